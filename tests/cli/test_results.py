"""Tests of `repro results`, and of the tables at the end of `repro run`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from repro import cli
from repro.config import EmulatedNetwork, systems
from repro.launch.simulated import simulate_experiment
from repro.results.schema import ComparisonRecord, ExperimentRecord
from repro.results.store import Store
from repro.util.console import sparkline
from tests.launch.runs import experiments, run, write_suite
from tests.records import changed
from tests.report import synthetic

Show = Callable[..., tuple[int, str, str]]
NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=8e6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with measured records, one emulated record, and two simulated ones, one of which does not fit."""
    root = tmp_path_factory.mktemp("store")
    measured = synthetic.records()
    one = next(r for r in measured if isinstance(r, ExperimentRecord) and r.name == "parity-z1-dp2")
    emulated = changed(one, name="lowbw", experiment={**one.conditions, "network": asdict(NETWORK)})
    case = synthetic.experiment("states-z1-dp2", dp=2, zero=1, precision="bf16", kernels="reference")
    fits = simulate_experiment(replace(case, system="selene"), systems.load_system_file("selene"), "smoke")
    tight = changed(fits, name="tight", outcome="oom", reason="out of memory, 8599967744 bytes requested")
    with Store(root) as opened:
        for record in (*measured, emulated, fits, tight):
            opened.append(record)
    return root


@pytest.fixture
def show(store: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function that prints results of the store and returns exit code, output and errors."""

    def show(*arguments: str, folder: Path = store) -> tuple[int, str, str]:
        return cli.main(["results", *arguments, "--results", str(folder)]), *capsys.readouterr()

    return show


def test_each_kind_of_evidence_has_a_separate_table(show: Show) -> None:
    code, out, _ = show("smoke", "--details")
    assert code == 0
    measured, remainder = out.split("smoke, 1 experiment, emulated:")
    emulated, simulated = remainder.split("smoke, 2 experiments, simulated:")
    assert "measured: real" in measured
    parts = (measured, emulated, simulated)
    for name, table in (("lowbw", emulated), ("tight", simulated), ("parity-tp2-sp", measured)):
        assert [name in part for part in parts] == [part is table for part in parts]
    assert re.search(r"(?m)^states-z1-dp2.* other devices", simulated)
    assert re.search(r"(?m)^tight .* oom", simulated)
    assert "tight: oom: out of memory, 8.60 GB requested" in simulated


def test_default_output_has_fastest_experiments_and_all_failures(show: Show) -> None:
    _, out, _ = show("smoke")
    assert "tight: oom: out of memory, 8.60 GB requested" in out
    assert "1 hang. 1 oom." in out
    assert "curve" not in out
    found = json.loads(show("smoke", "--json")[1])["experiments"]
    rows = [line for line in out.splitlines() if " x 1 x " in line]
    hidden = sum(int(words) for words in re.findall(r"--details lists (\d+) more", out))
    assert len(rows) + hidden == len(found) > len(rows)


def test_details_show_all_columns_with_units(show: Show) -> None:
    _, out, _ = show("parity-z?-dp2", "--details")
    names = ["parity-z0-dp2", "parity-z1-dp2", "parity-z2-dp2", "parity-z3-dp2"]
    found = json.loads(show("parity-z?-dp2", "--json")[1])["experiments"]
    assert sorted(each["name"] for each in found) == names
    rates = [each["tokens_per_s"] for each in found]
    assert rates == sorted(rates, reverse=True)
    lines = [line.split() for line in out.splitlines() if line.startswith("parity-")]
    assert [line[0] for line in lines[:4]] == [each["name"] for each in found]
    for words in ("(nats)", "(tokens/s)", "FLOP/s", "gradients", "activations", "sent", "█", "tp x pp x dp"):
        assert words in out
    assert all(f"{each['loss.last']:.4f}" in out for each in found)


def test_ratios_have_the_intervals_of_their_records(store: Path, show: Show) -> None:
    speed = [r for r in synthetic.records() if isinstance(r, ComparisonRecord)]
    with Store(store) as opened:
        for record in speed[:1]:
            for side in (record.baseline, record.subject):
                known = next(r for r in synthetic.records() if isinstance(r, ExperimentRecord))
                opened.append(changed(known, name=side.name, key=side.key, id=side.key))
    _, out, _ = show("speed-*")
    first = speed[0]
    line = next(line for line in out.splitlines() if "samples/s" in line)
    assert line.split()[:2] == [first.subject.name, first.baseline.name]
    assert f"{first.ratio:.3f}  {first.low:.3f} to {first.high:.3f}" in line
    (compared,) = json.loads(show("speed-*", "--json")[1])["comparisons"]
    assert (compared["low"], compared["evidence"]) == (first.low, "measured")


def test_narrow_terminal_shows_every_column(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = show("smoke", "--details")[1].splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        for heading in ("curve", "tokens", "activations", "sent", "global"):
            assert any(heading in line for line in lines)
        tables.append(sum(line.startswith("experiment ") for line in lines))
    assert tables[0] > tables[1] == 3


def test_plot_draws_the_loss_curves(show: Show, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the curves; it is in the extra report")
    for name, head in (("losses.svg", b"<svg"), ("losses.png", b"\x89PNG")):
        picture = tmp_path / name
        assert show("parity-*", "--plot", str(picture))[0] == 0
        assert picture.read_bytes().startswith(head)
    assert b"parity-z3-dp2" in (tmp_path / "losses.svg").read_bytes()
    code, _, err = show("tight", "--plot", str(picture))
    assert (code, "no selected experiment trained for two steps" in err) == (2, True)
    code, _, err = show("--plot", str(tmp_path / "x.pdf"))
    assert (code, ".svg or .png" in err) == (2, True)


def test_error_for_missing_results(show: Show, store: Path, tmp_path: Path) -> None:
    for words, folder, message in (
        (["smoek"], store, "a suite or a glob of experiments with results in .*: smoke"),
        ([], tmp_path / "nowhere", "nowhere': no such folder"),
        ([], tmp_path, "no records in .*"),
    ):
        code, out, err = show(*words, folder=folder)
        assert (code, out) == (2, "")
        assert re.search(f"{message}\n$", err)


def test_run_ends_with_its_totals_and_results(show: Show, tmp_path: Path) -> None:
    suite, folder = write_suite(tmp_path, experiments("a", "b")), tmp_path / "results"
    code, out, err = run(suite, folder, "--only", "a")
    assert code == 0, err
    totals, _, table = out.partition("\n\n")
    assert totals.startswith("faults: 1 experiment: 1 ok; all as expected\nrecords: ")
    assert f"/records; `repro results faults --results {folder}` shows them" in totals
    assert table.startswith("faults, 1 experiment, measured")
    assert "tokens" in table
    run(suite, folder)
    code, out, _ = show(str(suite), folder=folder)
    assert code == 0
    assert out.startswith("faults, 2 experiments, measured")


def test_sparkline_scales_and_averages_its_values() -> None:
    pairs: dict[str, list[Any]] = {"█▅▁": [3.0, 2.0, 1.0], "▁ █": [1.0, None, 8.0], "▁▁": [2.0, 2.0], "": []}
    pairs["█▆▃▁"] = [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert [sparkline(Console(), values, columns=4) for values in pairs.values()] == list(pairs)


def test_run_of_a_claim_selects_its_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Suites of other claims have experiments with the same names."""
    command = ["run", "--claim", "ds-3p75x-lowbw", "--dry-run", "--json", "--results", str(tmp_path)]
    assert cli.main(command) == 0
    found = {(each["suite"], each["name"]) for each in json.loads(capsys.readouterr().out)}
    assert {suite for suite, _ in found} >= {"windtunnel_3p75x", "windtunnel_smoke"}
    assert all(name.startswith("lowbw-") for _, name in found)
