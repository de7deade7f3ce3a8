"""Tests of the default output of every command: one screen in the style of the guide, and uncut at 40 columns."""

from __future__ import annotations

import inspect
import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table

from repro import cli
from repro.accuracy.calibrate.calibration import Calibrated
from repro.config import EmulatedNetwork
from repro.config.models import load_model
from repro.emulate.lab import LabNetwork
from repro.emulate.network import NetworkFacts
from repro.launch.slurm.case_states import CaseState
from repro.quality.evaluate.samples import find_protocol
from repro.report.text.cluster import print_cases
from repro.util.console import new_table, stdout
from repro.util.units import NO_VALUE
from tests.accuracy.twins.conftest import tables
from tests.claims.test_measurements import scored
from tests.cli.samples import EXEMPT, SAMPLES, cases
from tests.launch.slurm.conftest import ThreeCases

SCREEN_LINES, SCREEN_COLUMNS, SENTENCE_WORDS = 24, 100, 30
NARROW = (80, 40)
WIDE_COLUMNS = 1000
EXPENSIVE = ("twin", "plan", "simulate", "fit", "compare")
"""Commands whose runs take seconds; they do not run at 80 columns."""
VARIABLE_TEXT = re.compile(
    r"(\d+ traces|Traced)( in \S+ \w+)?|\S+ GB (of \S+ GB )?free|at most \S+ parameters|mine-\d+"
)
"""Text that differs between runs of a command: durations, free memory, file names."""
PRIVATE_WORDS = "room storey house thing doubt circle beside look said told kept gone whole"
"""Words that the style guide excludes, because users do not know their meaning in this project."""
Printed, Screen = Callable[[str, int], str], Callable[[str], str]
OTHER_PROGRAMS = {"lab exec": "the output of a command", "logs": "the end of a log file"}
"""Commands that print the output of other programs."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a text without commands and tables, whose rows have two spaces between cells."""
    paragraphs = [""]
    for line in text.splitlines():
        if re.search(r"\S  +\S|^  |^Next: ", line) or not line.strip():
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {line}"
    return [one for paragraph in paragraphs for one in re.split(r"(?<=[.;!?])\s", paragraph.strip()) if one]


def faults(text: str) -> list[str]:
    """Return the sentences that are too long or contain an excluded word."""
    words = re.compile(rf"\b({'|'.join(PRIVATE_WORDS.split())})s?\b", re.IGNORECASE)
    return [one for one in sentences(text) if len(one.split()) > SENTENCE_WORDS or words.search(one)]


NUMBER = re.compile(r"[≤≥<>~+-]?\d[\d,.]*(e-?\d+)?( to [\d,.]+| \([\d,. to]+\))?")
UNIT = re.compile(r"\([^)]+\)|%")
COUNT = re.compile(
    r"row|array|rows|micro- batch|\w+ ratio|stages?|steps|layers|ranks|rounds|models"
    r"|nodes|devices per node|experiments|failures|comparisons"
    r"|records|parameters|decided rows|in 90 % interval|in wider interval|error below .*|tp|pp|dp|cp|ZeRO( stage)?"
    r"|micro-batch|hidden size|ratio|formula|simulated|emulated|measured|"
)
"""Headers without a unit: counts, degrees, ratios, and evidence, which has the unit of `published`."""


def headers_without_unit(table: Table) -> list[str]:
    """Return the headers of columns of numbers that have neither a unit nor the name of a count."""
    found: list[str] = []
    if UNIT.search(str(table.columns[0].header)):  # the first header has the unit of all columns
        return found
    for column in table.columns:
        header = " ".join(str(column.header).split())
        cells = [str(cell) for cell in column.cells if str(cell) not in ("", NO_VALUE, "-")]
        has_unit = UNIT.search(header) or COUNT.fullmatch(header)
        if cells and all(map(NUMBER.fullmatch, cells)) and not has_unit:
            found.append(header)
    return found


def test_checks_find_headers_without_a_unit_long_sentences_and_excluded_words() -> None:
    rows = [("7", "1.5", "3", "2"), ("b", "2", "4", "3 to 4")]
    assert headers_without_unit(new_table("name", "time", "rows", "size (GB)", rows=rows)) == ["time"]
    wrong = "What is kept beside it is whole."
    assert faults(f"A table:\na  thing  of  doubt\n\nIt fits. {wrong}") == [wrong]
    assert (len(faults("one " * 31)), faults("one " * 30)) == (1, [])


def words(text: str) -> Counter[str]:
    """Return the number of occurrences of each word, number and bar."""
    return Counter(re.findall(r"[\w.]+|[█░▁-▇…]+", text))


def missing_words(wide: str, narrow: str, width: int) -> Counter[str]:
    """Return the words of `wide` that `narrow` lacks; text longer than half a line may be folded in `narrow`."""
    full, short = (VARIABLE_TEXT.sub("", " ".join(page.split())) for page in (wide, narrow))
    joined = short.replace(" ", "")
    tokens = [token for token in full.split() if len(token) < width // 2 or token not in joined]
    return words(" ".join(tokens)) - words(short)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return a function that runs a command at a width and returns its output."""

    def run(command: str, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        code = cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        assert code in (0, 1, 3), err
        return out

    return run


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, printed: Printed) -> Screen:
    """Return a function that runs a command, checks that its output is one screen of plain text, and returns it."""
    tables: list[Table] = []
    print_original = Console.print

    def record_and_print(console: Console, *values: Any, **options: Any) -> None:
        tables.extend(each for each in values if isinstance(each, Table))
        print_original(console, *values, **options)

    monkeypatch.setattr(Console, "print", record_and_print)

    def run(command: str) -> str:
        out = printed(command, SCREEN_COLUMNS)
        assert faults(out) == []
        assert len(out.splitlines()) <= SCREEN_LINES, out
        assert max(map(len, out.splitlines()), default=0) <= SCREEN_COLUMNS, out
        assert [header for table in tables for header in headers_without_unit(table)] == []
        return out

    return run


@pytest.mark.parametrize("command", cases(all_samples=True))
def test_answer_is_one_screen_and_narrow_output_has_all_words(
    command: str, samples_folder: None, in_process: None, screen: Screen, printed: Printed
) -> None:
    name = command.split()[0]
    wide = printed(command.format(width=WIDE_COLUMNS), WIDE_COLUMNS)
    pages = {SCREEN_COLUMNS: screen(command.format(width=SCREEN_COLUMNS))}
    pages |= {width: printed(command.format(width=width), width) for width in NARROW[name in EXPENSIVE :]}
    for width, page in pages.items():
        assert page
        assert page.count("…") <= wide.count("…"), width
        if name == "schedule":  # the drawing is split into time intervals, so its words depend on the width
            assert max(map(len, page.splitlines())) <= width
        else:
            assert not missing_words(wide, page, width), width


def test_narrow_status_has_all_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"submission": "x", "suite": "faults", "key": "k", "bundle": 0}
    case = CaseState(**names, name="fig8-c4-60b", job="12_3", state="failed", nodes="n[1-16]", outcome="hang")
    cases = [case, replace(case, name="fig8-c4-100b", detail="no rank wrote for ten minutes")]
    pages = {}
    for width in (*NARROW, SCREEN_COLUMNS, WIDE_COLUMNS):
        monkeypatch.setenv("COLUMNS", str(width))
        print_cases(cases, [], stdout(), None)
        pages[width] = capsys.readouterr().out
    assert not any(missing_words(pages[WIDE_COLUMNS], page, width) for width, page in pages.items())


@pytest.mark.parametrize("path", ["", "lab", *SAMPLES, *EXEMPT])
def test_narrow_help_has_all_words(path: str, printed: Printed) -> None:
    command: Any = typer.main.get_command(cli.app)
    for name in path.split():
        command = command.commands[name]
    message = [command.help or "", *(str(getattr(each, "help", None) or "") for each in command.params)]
    message += [option for each in command.params for option in each.opts if option.startswith("--")]
    message += [each.help.split("\n\n")[0] for each in getattr(command, "commands", {}).values()]
    for width in (*NARROW, SCREEN_COLUMNS):
        page = printed(f"{path} --help", width).replace("│", " ")
        assert "…" not in page
        assert not missing_words(" ".join(message), page, width), width
    assert path in ("", "lab") or f"Example:  repro {path}" in page


def test_answers_of_submissions(
    submitted: ThreeCases, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(submitted.results.parent)
    submitted.record("b", "ok")
    submitted.slurm.job("12_0", state="NODE_FAIL")
    options = f"--results {submitted.results.name}"
    assert "faults: 3 cases: " in screen(f"status {options}")
    assert "1 of 3 cases done" in screen(f"collect {options}")
    assert "Cancelled 1 job of 1 case" in screen(f"cancel c {options}")


@pytest.mark.slow
def test_answers_about_written_files(samples_folder: None, screen: Screen) -> None:
    assert screen("report --results store --out site").startswith("Report: site/index.html\n")
    assert not screen("export --table values --format csv --output values.csv --results store")
    assert not screen("artifact --output artifact.md")


def test_answer_about_a_measured_machine(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tables()
    facts = {"calls_measured": 900, "operators_measured": 90, "host_s_per_operator": 5e-6}
    facts |= {"spread_of_calls": 0.02, "error_of_rates": 0.05, "step_over_operators": 1.1}
    document["provenance"]["facts"] |= facts
    points = {"points": [[1e3, 1e-3], [1e7, 1e-2]]}
    for link in ("memory", "nvlink"):
        document["links"][link] = {"collectives": {f"collective-{i}": points for i in range(5)}}
    found = Calibrated("ok", "", 0, 95.0, Path("here.toml"), document)
    monkeypatch.setattr("repro.accuracy.calibrate.calibration.run_calibration", lambda *_, **__: found)
    out = screen("calibrate --system local")
    assert out.startswith("here.toml: a processor, 16 ranks, median error of the fitted rates 5.0 %.\n")
    assert re.search(r"collective-4 +nvlink +1 kB +1,000 +10 MB +1\b", out)


def test_answers_about_weights(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = asdict(find_protocol("lambada", "gpt2"))
    record = replace(scored("gpt2", accuracy_words=0.5, perplexity=10.0), way=protocol)
    monkeypatch.setattr("repro.quality.evaluate.run.run_evaluation", lambda *_: (record, 0))
    out = screen("evaluate --weights w --task lambada --data d")
    assert out.startswith("somebody's-lambada-gpt2: ok.\n")
    source = SimpleNamespace(kind="GPT-2", model=load_model("gpt2-tiny"), check=lambda: None)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("repro.quality.weights.open_weights", lambda *_: source)
    written = [tmp_path / "config.json"]
    monkeypatch.setattr("repro.quality.weights.huggingface.export_huggingface", lambda *_: written)
    assert "config.json" in screen(f"export-weights --weights w --output {tmp_path}")


def test_answer_about_a_network(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6)
    rates = {"between nodes": [8e6] * 2, "within a node": [1e9] * 4}
    settings = {"keeper": 12, "user_namespace": True, "ranks": [1] * 4, "nodes": [1] * 2, "cores": 2}
    facts = NetworkFacts(**settings, mtu=9000, payload_share=1.0, rates=rates, round_trip_s={"between": 1e-4})
    monkeypatch.setattr("repro.emulate.lab.missing_requirement", lambda: "")
    monkeypatch.setattr("repro.emulate.lab.start_network", lambda _: LabNetwork(network, facts))
    assert "8 to 8" in screen("lab up --between 8e6")


def leaf_commands(command: Any, path: tuple[str, ...] = ()) -> list[str]:
    if not hasattr(command, "commands"):
        return [" ".join(path)]
    return [leaf for name, each in command.commands.items() for leaf in leaf_commands(each, (*path, name))]


def test_every_command_has_a_screen() -> None:
    """A new command needs a sample, or an exemption and a test in this file that prints its answer."""
    tested = "\n".join(
        inspect.getsource(each) for name, each in globals().items() if name.startswith("test_answer")
    )
    commands = leaf_commands(typer.main.get_command(cli.app))
    assert sorted(commands) == sorted([*SAMPLES, *EXEMPT])
    for command in commands:
        printed = command in SAMPLES or re.search(rf'screen\(f?"{command}\b', tested)
        assert printed or command in OTHER_PROGRAMS, command


def test_answer_about_a_machine_without_optional_libraries(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details contain the commands that install the libraries."""
    monkeypatch.setattr("repro.launch.doctor.machine.versions", lambda names: {})
    answer = screen("doctor")
    assert re.search("limited +DeepSpeed +not installed +experiments with", answer)
    assert "pip install" not in answer
