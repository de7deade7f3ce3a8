"""The examples of README and docs: suites load, commands do what is shown under them, options exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from repro import cli
from repro.claims.reader import load_ledger
from repro.config import suites

ROOT = Path(__file__).parents[1]
GENERATED = ("commands.md", "keys.md")
"""Pages that are compared with their generators, by `test_docs`."""
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
)
SLOW = ("README.md", "first-hour.md", "simulate.md", "time.md", "kernels.md", "own-files.md", "systems.md")
"""Their commands take many seconds."""
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("REPRO_")}
CODE = "import sys; from repro.cli import main; sys.exit(main())"
NOT_HERE = {
    "repro run suites/windtunnel_3p75x": "minutes behind an emulated network",
    "repro run suites/convergence": "half an hour of training",
    "repro run suites/one_gpu": "a GPU",
    "repro run again --evidence simulated": "a minute of simulations",
    "repro gpu-day --minutes": "a GPU",
    "repro gpu-day --import": "the results of a visit",
    "repro gpu-day --rehearse": "minutes; make test-gpu-kit rehearses",
    "repro run mine.toml": "the twin of a calibrated machine, 16 ranks",
    "repro calibrate": "minutes of measuring",
    "repro simulate --model smoke-speed": "a calibrated machine",
    "repro twin": "a calibrated machine",
    "repro evaluate": "weights and texts that were published",
    "repro submit": "a cluster",
    "repro doctor --profile": "a cluster",
    "repro status": "a cluster",
    "repro logs": "a cluster",
    "repro cancel": "a cluster",
    "repro collect": "a cluster",
    "repro lab": "network namespaces",
    "repro doctor --kernels": "a compiler; tests/kernels compile them",
    "repro claims --system": "records of a minute's simulation; tests/cli makes some",
}
"""What examples need that a test has not: they are parsed all the same, and what can show what it would do does."""
SHOWS = ("repro run suites/", "repro run again", "repro submit")
"""Of these, what has `--dry-run`."""
STANDS_FOR = re.compile(r"\b[A-Z]{2,}\b|\[|·|--model M\b| [ABNPSM]\b")
"""Of a command that shows its form and is none."""


class Example(NamedTuple):
    command: str
    shown: list[str]
    """What stands under it."""


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The line before each indented block, and its lines."""
    found: list[str] = []
    before = ""
    for line in [*page.read_text(encoding="utf-8").splitlines(), "end"]:
        if line.startswith("    ") or (found and not line):
            found.append(line[4:])
        elif found:
            yield before, found
            found, before = [], line
        elif line:
            before = line


def examples(page: Path) -> list[Example]:
    found: list[Example] = []
    for _, lines in blocks(page):
        lines = "\n".join(lines).replace("\\\n", " ").split("\n")
        here: list[Example] = []
        for line in lines:
            given = re.match(r"(\$ )?(?:\.venv/bin/)?repro .*", line)
            if given is not None:
                parts = [part.strip() for part in re.split(r"\s+#\s|&&", given[0].removeprefix("$ "))]
                message = [part.removeprefix(".venv/bin/") for part in parts]
                here += [Example(part, []) for part in message if part.startswith("repro ")]
            elif here and line.strip():
                here[-1].shown.append(line)
        found += here
    return found


def here(command: str) -> str:
    """What a test runs of an example: all of it, or what it would do; empty where there is neither."""
    if "--dry-run" in command or not any(command.startswith(beginning) for beginning in NOT_HERE):
        return command
    return f"{command} --dry-run" if command.startswith(SHOWS) else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader is: suites, and profiles with one of the reader's own, of nodes that a suite needs."""
    (tmp_path / "suites").symlink_to(ROOT / "suites")
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    shutil.copy(ROOT / "slurm/dgx2.toml", tmp_path / "slurm/mine.toml")
    return tmp_path


ALL = [(page, example) for page in PAGES for example in examples(page)]
CONCRETE = [(page, example) for page, example in ALL if not STANDS_FOR.search(example.command)]


def test_there_are_examples() -> None:
    assert len(ALL) > 50
    assert len(CONCRETE) > 25
    for beginning in NOT_HERE:
        assert any(example.command.startswith(beginning) for _, example in CONCRETE), beginning


@pytest.mark.parametrize(("page", "example"), ALL, ids=lambda value: getattr(value, "command", None))
def test_commands_and_options_exist(page: Path, example: Example) -> None:
    if "·" in example.command:
        pytest.skip("a list of commands")
    group: Any = typer.main.get_command(cli.app)
    words = shlex.split(example.command)[1:]
    while hasattr(group, "commands"):
        assert words[0] in group.commands, example.command
        group = group.commands[words.pop(0)]
    known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
    # An argument with spaces is a text of options of its own.
    words = [part for word in words for part in word.split()]
    asked = {word.strip("[]").split("=")[0] for word in words if word.strip("[]").startswith("--")}
    assert asked <= known


@pytest.mark.parametrize(("page", "example"), CONCRETE, ids=lambda value: getattr(value, "command", None))
def test_they_parse(page: Path, example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option has a value of its type, whether the command can run here or not."""
    monkeypatch.chdir(folder)
    group: Any = typer.main.get_command(cli.app)
    words = shlex.split(example.command)[1:]
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("repro", words)


def alike(line: str, exact: bool) -> str:
    """A line but for its spaces, and for the numbers where a machine makes them."""
    line = " ".join(line.split())
    if exact:
        return line
    line = re.sub(r"[▁-█]+|\b\d[\d.,:]*", "#", line)
    return re.sub(r"(# min )?\b(ms|us|s|[MGT]FLOP/s|kB|MB|GB)\b", "unit", line)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[pytest.mark.xdist_group(page.name), *[pytest.mark.slow] * (page.name in SLOW)]
        )
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_they_print_what_is_shown(page: Path, folder: Path) -> None:
    """One after the other in one folder, with the files that the page says to save."""
    for before, lines in blocks(page):
        for name in re.findall(r"Save this as `([\w.]+)`", before):
            (folder / name).write_text("\n".join(lines[: next_command(lines)]))
    found = [(here(example.command), example.shown) for at, example in CONCRETE if at == page]
    for command, shown in [example for example in found if example[0]]:
        done = subprocess.run(
            [sys.executable, "-c", CODE, *shlex.split(command)[1:]],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENVIRONMENT, "COLUMNS": "130", "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert "Traceback" not in done.stdout
        assert done.returncode == (2 if any(line.startswith("error:") for line in shown) else 0), done.stdout
        measured = command.startswith("repro run") and "--dry-run" not in command
        printed = [alike(line, not measured) for line in done.stdout.splitlines()]
        for line in (alike(line, not measured) for line in shown if line != "..."):
            head = line.removesuffix(" ...")
            found = next(
                (i for i, p in enumerate(printed) if p == line or (head != line and p.startswith(head))), -1
            )
            assert found >= 0, f"{command}\nshows {line!r}, and prints\n{done.stdout}"
            # Who was the fastest is another one each time.
            printed = printed[:found] + printed[found + 1 :] if measured else printed[found + 1 :]


def next_command(lines: list[str]) -> int:
    """The number of lines before the first command of a block."""
    return next((at for at, line in enumerate(lines) if line.startswith("$ ")), len(lines))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_suites_and_claims_load(page: Path, tmp_path: Path) -> None:
    for _, lines in blocks(page):
        text = "\n".join(lines[: next_command(lines)])
        if "[[experiment]]" in text:
            (tmp_path / "small.toml").write_text(
                "layers = 2\nhidden = 64\nheads = 4\nvocab = 128\nseq = 64\n"
            )
            (tmp_path / "s.toml").write_text(text)
            suites.load_suite(tmp_path / "s.toml")
        if "[[claim]]" in text:
            (tmp_path / "mine.toml").write_text('title = "Mine"\n' + text.replace('id = "', 'id = "my-'))
            assert any(
                claim.id.startswith("my-") for claim in load_ledger(own=[tmp_path / "mine.toml"]).claims
            )
