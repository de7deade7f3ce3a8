"""Tests that the default output of every command fits one screen and follows the style guide."""

from __future__ import annotations

import inspect
import re
import shlex
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
from repro.quality.evaluate.samples import find_protocol
from repro.util.console import new_table
from repro.util.units import NO_VALUE
from tests.accuracy.twins.conftest import tables
from tests.claims.test_scores import scored
from tests.cli.samples import SAMPLES, cases
from tests.cli.test_widths import leaf_commands
from tests.launch.slurm.submitted import ThreeCases

SCREEN_LINES, SCREEN_COLUMNS, SENTENCE_WORDS = 24, 100, 30
PRIVATE_WORDS = "room storey house thing doubt circle beside look said told kept gone whole"
"""Words that the style guide excludes, because users do not know their meaning in this project."""
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
        header, cells = (
            " ".join(str(column.header).split()),
            [str(cell) for cell in column.cells if str(cell) not in ("", NO_VALUE, "-")],
        )
        if (
            cells
            and all(map(NUMBER.fullmatch, cells))
            and not (UNIT.search(header) or COUNT.fullmatch(header))
        ):
            found.append(header)
    return found


def test_check_finds_headers_without_a_unit() -> None:
    table = new_table(
        "name", "time", "rows", "size (GB)", rows=[("7", "1.5", "3", "2"), ("b", "2", "4", "3 to 4")]
    )
    assert headers_without_unit(table) == ["time"]


def test_check_finds_long_sentences_and_excluded_words() -> None:
    assert faults("A table:\na  thing  of  doubt\n\nIt fits. What is kept beside it is whole.") == [
        "What is kept beside it is whole."
    ]
    assert len(faults("one " * 31)) == 1
    assert not faults("one " * 30)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs a command, checks that its output is one screen of plain text, and returns it."""
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    tables: list[Table] = []
    print_original = Console.print

    def record_and_print(console: Console, *values: Any, **options: Any) -> None:
        tables.extend(each for each in values if isinstance(each, Table))
        print_original(console, *values, **options)

    monkeypatch.setattr(Console, "print", record_and_print)

    def run(command: str) -> str:
        code = cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        assert code in (0, 1, 3), err
        assert faults(out) == []
        assert len(out.splitlines()) <= SCREEN_LINES, out
        assert max(map(len, out.splitlines()), default=0) <= SCREEN_COLUMNS, out
        assert [header for table in tables for header in headers_without_unit(table)] == []
        return out

    return run


@pytest.mark.parametrize("command", cases(all_samples=True))
def test_answer_is_one_screen(
    command: str, samples_folder: Path, screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(samples_folder)
    assert screen(command.format(width="screen"))


def test_answers_of_submissions(
    submitted: ThreeCases, screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(submitted.results.parent)
    submitted.record("b", "ok")
    submitted.slurm.job("12_0", state="NODE_FAIL")
    options = f"--results {submitted.results.name}"
    assert "faults: 3 cases: " in screen(f"status {options}")
    assert "1 of 3 cases done" in screen(f"collect {options}")
    assert "Cancelled 1 job of 1 case" in screen(f"cancel c {options}")


@pytest.mark.slow
def test_answers_about_written_files(
    samples_folder: Path, screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(samples_folder)
    assert screen("report --results store --out site").startswith("Report: site/index.html\n")
    assert not screen("export --table values --format csv --output values.csv --results store")
    assert not screen("artifact --output artifact.md")


def test_answer_about_a_measured_machine(
    screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tables()
    document["provenance"]["facts"] |= {
        "calls_measured": 900,
        "operators_measured": 90,
        "host_s_per_operator": 5e-6,
        "spread_of_calls": 0.02,
        "error_of_rates": 0.05,
        "step_over_operators": 1.1,
    }
    points = {"points": [[1e3, 1e-3], [1e7, 1e-2]]}
    for link in ("memory", "nvlink"):
        document["links"][link] = {"collectives": {f"collective-{i}": points for i in range(5)}}
    found = Calibrated("ok", "", 0, 95.0, Path("here.toml"), document)
    monkeypatch.setattr("repro.accuracy.calibrate.calibration.run_calibration", lambda *_, **__: found)
    out = screen("calibrate --system local")
    assert out.startswith("here.toml: a processor, 16 ranks, median error of the rates 5.0 %.\n")
    assert re.search(r"collective-4 +nvlink +1 kB +1,000 +10 MB +1\b", out)


def test_answers_about_weights(
    screen: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_answer_about_a_network(screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6)
    rates = {"between nodes": [8e6] * 2, "within a node": [1e9] * 4}
    settings = {"keeper": 12, "user_namespace": True, "ranks": [1] * 4, "nodes": [1] * 2, "cores": 2}
    facts = NetworkFacts(**settings, mtu=9000, payload_share=1.0, rates=rates, round_trip_s={"between": 1e-4})
    monkeypatch.setattr("repro.emulate.lab.missing_requirement", lambda: "")
    monkeypatch.setattr("repro.emulate.lab.start_network", lambda _: LabNetwork(network, facts))
    assert "8 to 8" in screen("lab up --between 8e6")


def test_every_command_has_a_screen() -> None:
    """A new command needs a sample, or a test in this file that prints its answer."""
    tested = "\n".join(
        inspect.getsource(each) for name, each in globals().items() if name.startswith("test_answer")
    )
    for command in leaf_commands(typer.main.get_command(cli.app)):
        printed = command in SAMPLES or re.search(rf'screen\(f?"{command}\b', tested)
        assert printed or command in OTHER_PROGRAMS, command


def test_answer_about_a_machine_without_optional_libraries(
    screen: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details contain the commands that install the libraries."""
    monkeypatch.setattr("repro.launch.doctor.machine.versions", lambda names: {})
    answer = screen("doctor")
    assert re.search("limited +DeepSpeed +not installed +experiments with", answer)
    assert "pip install" not in answer
