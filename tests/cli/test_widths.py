"""Every command at 40, 80, 100 and 200 columns: no word is cut, and nothing that a wide page shows is lost."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from repro import cli, suites, systems
from repro.calibrate.toml import text as toml
from repro.cli.views.status import _show
from repro.launch.simulated import attempt
from repro.launch.slurm.following.states import CaseState
from repro.render.console import stdout
from repro.results.store import Store
from tests.report import synthetic
from tests.twin.conftest import tables

WIDTHS = (40, 80, 100, 200)
WIDEST = 1000
SUITES = Path(__file__).parents[2] / "suites"
ONE_STEP = "--model tiny.toml --system dgx2"
SAMPLES = {
    "run": [f"run {SUITES / 'smoke.toml'} --dry-run --only 'states-*' --results store"],
    "results": ["results smoke --results store"],
    "init": ["init mine-{width}.toml"],
    "doctor": ["doctor --results store"],
    "claims": [
        "claims --results store",
        "claims zero-fig2-throughput --results store",
        "claims --system dgx-h100 --results store",
    ],
    "models": ["models", "models gpt2-1.5b"],
    "systems": ["systems", "systems dgx2", "systems here.toml"],
    "compare": ["compare store store"],
    "schedule": ["schedule --pp 4 --micro-batches 8", "schedule --pp 4 --micro-batches 8 --chunks 2"],
    "simulate": [f"simulate {ONE_STEP} --gpus 4 --tp 2 --pp 2 --zero 1"],
    "fit": [f"fit {ONE_STEP} --gpus 2 --micro-batch 1 --memory-limit 1440MB"],
    "plan": [
        f"plan {ONE_STEP} --gpus 4 --tp 2 --pp 2 --micro-batch 1 --recompute --top 3",
        f"plan {ONE_STEP} --gpus 4 --map --zero 1 --micro-batch 1",
    ],
    "twin": ["twin deepspeed_lowbw/lowbw-megatron --machine here.toml"],
    "validate": ["validate --results store", "validate --unknowns --results store"],
    "lab check": ["lab check"],
    "lab status": ["lab status"],
    "lab down": ["lab down"],
}
"""What each command is tried with."""
EXEMPT = {
    **dict.fromkeys(("submit", "status", "logs", "cancel", "collect"), "needs a submission to SLURM"),
    **dict.fromkeys(("lab up", "lab exec"), "makes or needs an emulated network"),
    **dict.fromkeys(("report", "export", "artifact", "export-weights"), "writes files"),
    "evaluate": "needs weights",
    "calibrate": "measures this machine for minutes",
}
"""Commands that are not tried, and why."""
LONG = {"schedule": "the drawing is broken into lines of time, so its words depend on the width"}
SLOW = ("twin", "plan", "simulate", "fit", "compare")
"""Commands that are tried at 40 and 100 columns only, as they trace steps or judge the ledger twice."""
CHANGES = re.compile(
    r"(\d+ traces|Traced)( in \S+ \w+)?|\S+ GB (of \S+ GB )?free|at most \S+ parameters|mine-\d+"
)
"""What differs from one run of a command to the next: durations, free memory, names of files."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[str]:
    if not hasattr(command, "commands"):
        return [" ".join(path)]
    return [leaf for name, each in command.commands.items() for leaf in leaves(each, (*path, name))]


def words(text: str) -> Counter[str]:
    """Runs of letters and digits, and whole bars."""
    return Counter(re.findall(r"[\w.]+|[█░▁-▇…]+", text))


def lost(wide: str, narrow: str, width: int) -> Counter[str]:
    """The words of the wide page that the narrow one lacks; what is longer than half a line may be folded there."""
    whole, parts = (CHANGES.sub("", " ".join(page.split())) for page in (wide, narrow))
    joined = parts.replace(" ", "")
    here = [token for token in whole.split() if len(token) < width // 2 or token not in joined]
    return words(" ".join(here)) - words(parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store, a model and a machine."""
    root = tmp_path_factory.mktemp("widths")
    (root / "tiny.toml").write_text("layers = 4\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    (root / "here.toml").write_text(toml(tables()))
    entries = suites.load(SUITES / "zero_throughput.toml").entries
    asked = next(entry.experiment for entry in entries if entry.experiment.name == "fig2-40b-zero")
    simulated = attempt(asked, systems.load(asked.system), "zero_throughput")
    with Store(root / "store") as store:
        for record in (*synthetic.records(), simulated):
            store.append(record)
    return root


@pytest.fixture(autouse=True)
def _prepared(folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    code = cli.main(shlex.split(command.format(width=width)))
    out, err = capsys.readouterr()
    assert code in (0, 1, 3), err
    return out


def test_every_command_is_tried() -> None:
    assert sorted(leaves(typer.main.get_command(cli.app))) == sorted([*SAMPLES, *EXEMPT])


@pytest.mark.parametrize("command", [sample for samples in SAMPLES.values() for sample in samples])
def test_no_word_is_cut(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = printed(capsys, monkeypatch, command, WIDEST)
    for width in WIDTHS if command.split()[0] not in SLOW else (40, 100):
        narrow = printed(capsys, monkeypatch, command, width)
        assert narrow.count("…") <= wide.count("…"), width
        if command.split()[0] in LONG:
            assert max(map(len, narrow.splitlines())) <= width
        else:
            assert not lost(wide, narrow, width), width


def test_no_word_of_a_status_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"submission": "x", "suite": "faults", "key": "k", "bundle": 0}
    case = CaseState(**names, name="fig8-c4-60b", job="12_3", state="failed", nodes="n[1-16]", outcome="hang")
    cases = [case, replace(case, name="fig8-c4-100b", detail="no rank wrote for ten minutes")]
    pages = {}
    for width in (*WIDTHS, WIDEST):
        monkeypatch.setenv("COLUMNS", str(width))
        _show(cases, [], stdout())
        pages[width] = capsys.readouterr().out
    assert [width for width in WIDTHS if lost(pages[WIDEST], pages[width], width)] == []


@pytest.mark.parametrize("path", ["", "lab", *SAMPLES, *EXEMPT])
def test_no_word_of_a_help_is_cut(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = typer.main.get_command(cli.app)
    for name in path.split():
        command = command.commands[name]
    said = [command.help or "", *(str(getattr(each, "help", None) or "") for each in command.params)]
    said += [option for each in command.params for option in each.opts if option.startswith("--")]
    said += [each.help.split("\n\n")[0] for each in getattr(command, "commands", {}).values()]
    for width in WIDTHS:
        page = printed(capsys, monkeypatch, f"{path} --help", width).replace("│", " ")
        assert "…" not in page
        assert not lost(" ".join(said), page, width), width
