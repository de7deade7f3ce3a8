"""Tests of every command at 40, 80 and 100 columns: narrow output has all words of wide output, uncut."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from repro import cli
from repro.launch.slurm.case_states import CaseState
from repro.report.text.cluster import print_cases
from repro.util.console import stdout
from tests.cli.samples import EXEMPT, SAMPLES, cases

WIDTHS = (40, 80, 100)
WIDE_COLUMNS = 1000
WIDTH_DEPENDENT = {"schedule": "the drawing is split into time intervals, so its words depend on the width"}
TWO_WIDTHS = ("twin", "plan", "simulate", "fit", "compare")
"""Commands that run at 40 and 100 columns only, because each run takes seconds."""
VARIABLE_TEXT = re.compile(
    r"(\d+ traces|Traced)( in \S+ \w+)?|\S+ GB (of \S+ GB )?free|at most \S+ parameters|mine-\d+"
)
"""Text that differs between runs of a command: durations, free memory, file names."""


def leaf_commands(command: Any, path: tuple[str, ...] = ()) -> list[str]:
    if not hasattr(command, "commands"):
        return [" ".join(path)]
    return [leaf for name, each in command.commands.items() for leaf in leaf_commands(each, (*path, name))]


def words(text: str) -> Counter[str]:
    """Return the number of occurrences of each word, number and bar."""
    return Counter(re.findall(r"[\w.]+|[█░▁-▇…]+", text))


def missing_words(wide: str, narrow: str, width: int) -> Counter[str]:
    """Return the words of `wide` that `narrow` lacks; text longer than half a line may be folded in `narrow`."""
    full, short = (VARIABLE_TEXT.sub("", " ".join(page.split())) for page in (wide, narrow))
    joined = short.replace(" ", "")
    tokens = [token for token in full.split() if len(token) < width // 2 or token not in joined]
    return words(" ".join(tokens)) - words(short)


@pytest.fixture(autouse=True)
def _prepared(samples_folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(samples_folder)


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    code = cli.main(shlex.split(command.format(width=width)))
    out, err = capsys.readouterr()
    assert code in (0, 1, 3), err
    return out


def test_every_command_has_a_sample_or_an_exemption() -> None:
    assert sorted(leaf_commands(typer.main.get_command(cli.app))) == sorted([*SAMPLES, *EXEMPT])


@pytest.mark.parametrize("command", cases(all_samples=True))
def test_narrow_output_has_all_words(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = printed(capsys, monkeypatch, command, WIDE_COLUMNS)
    for width in WIDTHS if command.split()[0] not in TWO_WIDTHS else (40, 100):
        narrow = printed(capsys, monkeypatch, command, width)
        assert narrow.count("…") <= wide.count("…"), width
        if command.split()[0] in WIDTH_DEPENDENT:
            assert max(map(len, narrow.splitlines())) <= width
        else:
            assert not missing_words(wide, narrow, width), width


def test_narrow_status_has_all_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"submission": "x", "suite": "faults", "key": "k", "bundle": 0}
    case = CaseState(**names, name="fig8-c4-60b", job="12_3", state="failed", nodes="n[1-16]", outcome="hang")
    cases = [case, replace(case, name="fig8-c4-100b", detail="no rank wrote for ten minutes")]
    pages = {}
    for width in (*WIDTHS, WIDE_COLUMNS):
        monkeypatch.setenv("COLUMNS", str(width))
        print_cases(cases, [], stdout(), None)
        pages[width] = capsys.readouterr().out
    assert [width for width in WIDTHS if missing_words(pages[WIDE_COLUMNS], pages[width], width)] == []


@pytest.mark.parametrize("path", ["", "lab", *SAMPLES, *EXEMPT])
def test_narrow_help_has_all_words(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = typer.main.get_command(cli.app)
    for name in path.split():
        command = command.commands[name]
    message = [command.help or "", *(str(getattr(each, "help", None) or "") for each in command.params)]
    message += [option for each in command.params for option in each.opts if option.startswith("--")]
    message += [each.help.split("\n\n")[0] for each in getattr(command, "commands", {}).values()]
    for width in WIDTHS:
        page = printed(capsys, monkeypatch, f"{path} --help", width).replace("│", " ")
        assert "…" not in page
        assert not missing_words(" ".join(message), page, width), width
