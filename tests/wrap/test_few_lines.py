"""Tests of `examples/`: a few changed lines parallelize each script, and its losses stay equal."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from repro.claims import formulas
from tests import committed
from tests.pool import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "plain").glob("*.py"))
LOSS = re.compile(r"([a-z][a-z0-9 -]*): loss (\d+\.\d{8})")
"""Pattern of one loss in the output. Lines of ranks that share a pipe may be joined."""


def run_script(kind: str, name: str, checkpoint: Path) -> str:
    """Run a script in this process and return its output."""
    path = str(EXAMPLES / kind / f"{name}.py")
    given = {"nanogpt": [runpy.__file__, str(checkpoint)], "finetune": [str(checkpoint)]}.get(name, [])
    with mock.patch.object(sys, "argv", [path, *given]), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def losses(printed: str, ranks: int) -> list[float]:
    """Return the mean loss over ranks of every pass; a label in the output identifies the pass."""
    found = defaultdict(list)
    for label, loss in LOSS.findall(printed):
        found[label].append(float(loss))
    return [sum(each) / ranks for each in found.values()]


@pytest.mark.parametrize("name", NAMES)
def test_plain_and_parallel_scripts_have_equal_losses(two: RankPool, name: str, tmp_path: Path) -> None:
    plain, parallel = tmp_path / "alone.pt", tmp_path / "spread.pt"
    torch.set_num_threads(1)
    expected = losses(run_script("plain", name, plain), 1)
    assert len(expected) >= 10
    assert sum(expected[-4:]) < sum(expected[:4])
    found = two.run(run_script, "zero", name, parallel)
    assert losses("".join(found), 2) == pytest.approx(expected, rel=1e-5)
    if plain.exists():
        weights = torch.load(parallel)
        for key, value in torch.load(plain).items():
            if key in weights:  # a tied matrix has two names in a state_dict and one name as a parameter
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert len(weights) > 5


@pytest.mark.slow
def test_torchrun_runs_the_lora_example(tmp_path: Path) -> None:
    """The script's first lines give this command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path}"]  # by default, torchrun leaves a folder in /tmp
    script = EXAMPLES / "zero" / "lora.py"
    done = subprocess.run([*command, script], capture_output=True, text=True, check=True)
    assert losses(done.stdout, 2) == pytest.approx(losses(run_script("plain", "lora", tmp_path), 1), rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a\nb\nc", "a\nb\nc", 0),
        ("a\nb\nc", "a\nx\nc", 1),  # one replaced line
        ("a\nb\nc", "a\nb\n    x = 1\nc", 1),
        ("a\nb\nc", "a\nc", 1),
        ("a\nb\nc", "a\nx\ny\nc", 2),
        ("a\nb\nc", "# d\na\n\nb\n\n# e\nc", 0),
        ("a\nb", "a\nif c:\n    b", 2),  # an indented line counts as changed
    ],
)
def test_changed_lines_ignores_comments_and_blank_lines(
    before: str, after: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, text in (("plain", before), ("zero", after)):
        (tmp_path / "examples" / kind).mkdir(parents=True)
        (tmp_path / "examples" / kind / "made_up.py").write_text(text)
    monkeypatch.setattr(formulas, "files", lambda package: tmp_path.joinpath(*package.split(".")[1:]))
    formulas.changed_lines.cache_clear()
    assert formulas.changed_lines("made_up") == lines
    formulas.changed_lines.cache_clear()


def test_claim_ds_few_lines_counts_every_example() -> None:
    claim = committed.ledger().claim("ds-few-lines")
    counted = {evidence.value.text for row in claim.rows for evidence in row.evidence}
    assert counted == {f'changed_lines("{name}")' for name in NAMES}
    assert sorted(path.stem for path in (EXAMPLES / "zero").glob("*.py")) == NAMES


def test_readme_states_the_changed_lines_of_all_examples() -> None:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    lines = [formulas.changed_lines(name) for name in NAMES]
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    changed = f"the {words[min(lines)]} to {words[max(lines)]} changed lines of {words[len(NAMES)]} scripts"
    assert changed in " ".join(readme.split())
