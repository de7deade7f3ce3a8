"""Tests of README and docs: links, lists, reference pages, and examples, which parse and print the shown output."""

from __future__ import annotations

import importlib
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

from repro import __version__, cli
from repro.claims.ledger import ClaimEntry
from repro.claims.reader import load_ledger
from repro.config import Layout, Model, suites
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass
from repro.config.links import Link
from tests.launch import runs
from tests.test_text import GENERATED, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:repro|kernels|suites|slurm|reports|tests|docs)/[\w./*-]*)`")
PLACEHOLDER = re.compile(r"NAME|NN")
ABSENT = ("reports/out/", "reports/artifact.md", "slurm/mine.toml", "repro/kernels")
"""Files that commands create, a file of the user, and a folder of the user's cache."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from (link for link in LINK.findall(text) if not link.startswith("http"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_have_existing_targets(page: Path) -> None:
    missing = []
    for link in targets(page):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    assert not missing
    text = page.read_text(encoding="utf-8")
    named = [name for name in FILE.findall(text) if not (name.startswith(ABSENT) or PLACEHOLDER.search(name))]
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_the_citation_names_the_current_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_suite_is_in_a_table_of_the_docs() -> None:
    tables = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("suites.md", "twins.md"))
    assert [f.stem for f in (ROOT / "suites").glob("*.toml") if f"\n| `{f.stem}` |" not in tables] == []


@pytest.mark.parametrize("name", ["command", "key"])
def test_reference_pages_equal_their_generators(name: str) -> None:
    page = (ROOT / "docs" / f"{name}s.md").read_text(encoding="utf-8")
    module = importlib.import_module(f"tests.{name}_reference")
    assert page == module.reference(), "run `make artifact`"


def test_the_reference_lists_every_key_of_a_file() -> None:
    """The error about an unknown key lists all known keys."""
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    for cls in (Layout, Model, Link, ClaimEntry):
        with pytest.raises(ConfigError, match="known are") as caught:
            build_dataclass(cls, {"qqqqqqqq": 1})
        known = str(caught.value).partition("known are ")[2].split(", ")
        assert len(known) > 10
        assert [key for key in known if f"\n| `{key}` |" not in page] == []


@pytest.mark.parametrize(
    ("listing", "pattern"),
    [
        ("README.md", r"\(docs/([\w-]+\.md)\)"),
        ("docs/index.md", r"\(([\w-]+\.md)\)"),
        ("mkdocs.yml", r" ([\w-]+\.md)$"),
    ],
)
def test_lists_of_pages_have_every_page_once(listing: str, pattern: str) -> None:
    """README, the index page and the navigation of the site list all pages except `index.md`."""
    text = (ROOT / listing).read_text(encoding="utf-8").rpartition("## Documentation\n")[2]
    listed = re.findall(pattern, text, re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(name for name in listed if name != "index.md") == sorted(pages)


def test_pages_of_the_site_link_only_to_its_pages() -> None:
    """`build/docs` has no other file of the repository."""
    links = [(page.name, link) for page in (ROOT / "docs").glob("*.md") for link in targets(page)]
    assert [(page, link) for page, link in links if "/" in link] == []


EXAMPLE_PAGES = [page for page in PAGES if page.name not in (*GENERATED, "CONTRIBUTING.md", "CHANGELOG.md")]
SLOW = ("README.md", "first-hour.md", "simulate.md", "time.md", "kernels.md", "own-files.md", "systems.md")
"""Pages whose commands take many seconds."""
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("REPRO_")}
CODE = "import sys; from repro.cli import main; sys.exit(main())"
UNAVAILABLE = {
    "repro run suites/windtunnel_3p75x": "minutes behind an emulated network",
    "repro run suites/convergence": "half an hour of training",
    "repro run suites/one_gpu": "a GPU",
    "repro run again --evidence simulated": "a minute of simulations",
    "repro gpu-day --minutes": "a GPU",
    "repro gpu-day --import": "the results of a GPU day",
    "repro gpu-day --rehearse": "minutes; `make test-gpu-kit` runs the rehearsal",
    "repro run mine.toml": "the twin of a calibrated machine, 16 ranks",
    "repro calibrate": "minutes of measurements",
    "repro simulate --model smoke-speed": "a calibrated machine",
    "repro twin": "a calibrated machine",
    "repro evaluate": "published weights and texts",
    "repro submit": "a cluster",
    "repro doctor --profile": "a cluster",
    "repro status": "a cluster",
    "repro logs": "a cluster",
    "repro cancel": "a cluster",
    "repro collect": "a cluster",
    "repro lab": "network namespaces",
    "repro doctor --kernels": "a compiler; tests/kernels compiles the kernels",
    "repro claims --system": "records of a simulation of one minute; tests/cli has a test",
}
"""Requirements of examples that a test does not have, by the command's beginning. The test parses these commands."""
DRY_RUN = ("repro run suites/", "repro run again", "repro submit")
"""Unavailable commands that a test runs with `--dry-run`."""
GENERAL_FORM = re.compile(r"\b[A-Z]{2,}\b|\[|·|--model M\b| [ABNPSM]\b")
"""Placeholders in a command's general form, which a test cannot run."""


class Example(NamedTuple):
    command: str
    shown: list[str]
    """Lines under the command: its shown output."""


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the line before each indented block, and the lines of the block."""
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
        in_block: list[Example] = []
        for line in "\n".join(lines).replace("\\\n", " ").split("\n"):
            command = re.match(r"(\$ )?(?:\.venv/bin/)?repro .*", line)
            if command is not None:
                parts = [part.strip() for part in re.split(r"\s+#\s|&&", command[0].removeprefix("$ "))]
                parts = [part.removeprefix(".venv/bin/") for part in parts]
                in_block += [Example(part, []) for part in parts if part.startswith("repro ")]
            elif in_block and line.strip():
                in_block[-1].shown.append(line)
        found += in_block
    return found


def runnable(command: str) -> str:
    """Return the command that a test runs: the example, the example with `--dry-run`, or an empty text for neither."""
    if "--dry-run" in command or not any(command.startswith(beginning) for beginning in UNAVAILABLE):
        return command
    return f"{command} --dry-run" if command.startswith(DRY_RUN) else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a user's folder with the suites and with profiles, one of which is the user's."""
    (tmp_path / "suites").symlink_to(ROOT / "suites")
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    shutil.copy(ROOT / "slurm/dgx2.toml", tmp_path / "slurm/mine.toml")
    return tmp_path


EXAMPLES = [(page, example) for page in EXAMPLE_PAGES for example in examples(page)]
COMMANDS = [(page, example) for page, example in EXAMPLES if not GENERAL_FORM.search(example.command)]


def test_the_pages_have_examples_of_each_kind() -> None:
    assert len(EXAMPLES) > 50
    assert len(COMMANDS) > 25
    for beginning in UNAVAILABLE:
        assert any(example.command.startswith(beginning) for _, example in COMMANDS), beginning


@pytest.mark.parametrize("page", EXAMPLE_PAGES, ids=lambda page: page.name)
def test_examples_parse(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option exists and has a value of its type; this includes commands that a test cannot run.

    Placeholders have no value of a type, so only the options of a command with a placeholder are compared.
    """
    monkeypatch.chdir(folder)
    for command in (example.command for place, example in EXAMPLES if place == page):
        if "·" in command:  # a list of commands
            continue
        group: Any = typer.main.get_command(cli.app)
        words = shlex.split(command)[1:]
        while hasattr(group, "commands"):
            assert words[0] in group.commands, command
            group = group.commands[words.pop(0)]
        if GENERAL_FORM.search(command):
            known = {option for each in group.params for option in (*each.opts, *each.secondary_opts)}
            # An argument with spaces may contain options.
            parts = [part.strip("[]") for word in words for part in word.split()]
            assert {part.split("=")[0] for part in parts if part.startswith("--")} <= known, command
        else:
            group.make_context("repro", words)


def normalized(line: str, exact: bool) -> str:
    """Return a line with normalized spaces and, unless `exact`, without numbers and units."""
    line = " ".join(line.split())
    if exact:
        return line
    line = re.sub(r"[▁-█]+|\b\d[\d.,:]*", "#", line)
    return re.sub(r"(# min )?\b(ms|us|s|[MGT]FLOP/s|kB|MB|GB)\b", "unit", line)


def marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xdist_group(page.name), *[pytest.mark.slow] * (page.name in SLOW)]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page)) for page in EXAMPLE_PAGES], ids=lambda page: page.name
)
def test_examples_print_the_shown_output(page: Path, folder: Path) -> None:
    """The commands of a page run in order in one folder with the files that the page tells the user to save."""
    for before, lines in blocks(page):
        for name in re.findall(r"Save this as `([\w.]+)`", before):
            (folder / name).write_text("\n".join(lines[: next_command(lines)]))
    found = [(runnable(example.command), example.shown) for place, example in COMMANDS if place == page]
    for command, shown in [example for example in found if example[0]]:
        program = [sys.executable, "-c", CODE, *shlex.split(command)[1:]]
        environment = {**ENVIRONMENT, "COLUMNS": "130", "PYTHONPATH": str(ROOT)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done: Any = subprocess.run(program, cwd=folder, env=environment, check=False, **output)
        assert "Traceback" not in done.stdout
        assert done.returncode == (2 if any(line.startswith("error:") for line in shown) else 0), done.stdout
        measured = command.startswith("repro run") and "--dry-run" not in command
        printed = [normalized(line, not measured) for line in done.stdout.splitlines()]
        for line in (normalized(line, not measured) for line in shown if line != "..."):
            head = line.removesuffix(" ...")
            at = [i for i, p in enumerate(printed) if p == line or (head != line and p.startswith(head))]
            assert at, f"{command}\nshows {line!r}, and prints\n{done.stdout}"
            # The order of measured rows varies between runs.
            printed = (printed[: at[0]] if measured else []) + printed[at[0] + 1 :]


def next_command(lines: list[str]) -> int:
    """Return the number of lines before the first command of a block."""
    return next((index for index, line in enumerate(lines) if line.startswith("$ ")), len(lines))


@pytest.mark.parametrize("page", EXAMPLE_PAGES, ids=lambda page: page.name)
def test_suites_and_claims_of_examples_load(page: Path, tmp_path: Path) -> None:
    for _, lines in blocks(page):
        text = "\n".join(lines[: next_command(lines)])
        if "[[experiment]]" in text:
            (tmp_path / "small.toml").write_text(runs.MODEL)
            (tmp_path / "s.toml").write_text(text)
            suites.load_suite(tmp_path / "s.toml")
        if "[[claim]]" in text:
            (tmp_path / "mine.toml").write_text('title = "Mine"\n' + text.replace('id = "', 'id = "my-'))
            claims = load_ledger(own=[tmp_path / "mine.toml"]).claims
            assert any(claim.id.startswith("my-") for claim in claims)
