"""The scripts of `examples/`: each trains as it does alone after the few lines that the release speaks of."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from repro.claims import formulas
from tests import committed
from tests.pool import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "plain").glob("*.py"))
LOSS = re.compile(r"([a-z][a-z0-9 -]*): loss (\d+\.\d{8})")
"""Lines of ranks that share a pipe may run together."""


def arguments(name: str, checkpoint: Path) -> list[str]:
    """What the script is called with."""
    given = {"nanogpt": [runpy.__file__, str(checkpoint)], "finetune": [str(checkpoint)]}
    return given.get(name, [])


def run(kind: str, name: str, given: list[str]) -> str:
    """What the script prints."""
    path, before = str(EXAMPLES / kind / f"{name}.py"), sys.argv
    sys.argv = [path, *given]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def losses(printed: str, ranks: int) -> list[float]:
    """The loss of every pass: the mean over ranks of what each printed beside the same words."""
    found = defaultdict(list)
    for what, loss in LOSS.findall(printed):
        found[what].append(float(loss))
    return [sum(each) / ranks for each in found.values()]


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_trains_the_same(two: RankPool, name: str, tmp_path: Path) -> None:
    alone, spread = tmp_path / "alone.pt", tmp_path / "spread.pt"
    torch.set_num_threads(1)
    expected = losses(run("plain", name, arguments(name, alone)), 1)
    assert len(expected) >= 10
    assert sum(expected[-4:]) < sum(expected[:4])
    found = two.run(run, "zero", name, arguments(name, spread))
    assert losses("".join(found), 2) == pytest.approx(expected, rel=1e-5)
    if alone.exists():
        weights = torch.load(spread)
        for key, value in torch.load(alone).items():
            if key in weights:  # a tied matrix has two names in a state_dict, and one among parameters
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert len(weights) > 5


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path: Path) -> None:
    """As its first lines say, in processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path}"]  # else torchrun makes a folder in /tmp and leaves it there
    script = EXAMPLES / "zero" / "lora.py"
    done = subprocess.run([*command, script], capture_output=True, text=True, check=True)
    assert losses(done.stdout, 2) == pytest.approx(losses(run("plain", "lora", []), 1), rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a\nb\nc", "a\nb\nc", 0),
        ("a\nb\nc", "a\nx\nc", 1),  # a line in the place of another
        ("a\nb\nc", "a\nb\n    x = 1\nc", 1),
        ("a\nb\nc", "a\nc", 1),
        ("a\nb\nc", "a\nx\ny\nc", 2),
        ("a\nb\nc", "# d\na\n\nb\n\n# e\nc", 0),
        ("a\nb", "a\nif c:\n    b", 2),  # an indented line is another one
    ],
)
def test_changed_lines(
    before: str, after: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, text in (("plain", before), ("zero", after)):
        (tmp_path / "examples" / kind).mkdir(parents=True)
        (tmp_path / "examples" / kind / "made_up.py").write_text(text)
    monkeypatch.setattr(formulas, "files", lambda package: tmp_path.joinpath(*package.split(".")[1:]))
    formulas.changed_lines.cache_clear()
    assert formulas.changed_lines("made_up") == lines
    formulas.changed_lines.cache_clear()


def test_the_claim_counts_every_pair() -> None:
    claim = committed.ledger().claim("ds-few-lines")
    counted = {evidence.value.text for row in claim.rows for evidence in row.evidence}
    assert counted == {f'changed_lines("{name}")' for name in NAMES}
    assert sorted(path.stem for path in (EXAMPLES / "zero").glob("*.py")) == NAMES


def test_the_readme_says_how_many() -> None:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    lines = [formulas.changed_lines(name) for name in NAMES]
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    changed = f"the {words[min(lines)]} to {words[max(lines)]} changed lines of {words[len(NAMES)]} scripts"
    assert changed in " ".join(readme.split())
