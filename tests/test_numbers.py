"""Tests that the numbers in README and docs equal the ledger, the reference records and the store of `make smoke`.

With REPRO_STORE=DIR, the tests of simulated numbers read the store DIR. Without REPRO_STORE, they are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

import pytest

from repro import cli
from repro.accuracy.validate.machine import predict_measured_runs
from repro.accuracy.validate.published import (
    CALIBRATION,
    CLOSE_ERROR,
    MEMORY,
    PEAK_MEMORY,
    RATE,
    RATIO,
    RATIOS,
    Point,
    family_statistics,
    points,
    source_statistics,
)
from repro.claims.headlines import headline_lines
from repro.claims.judge import judge
from repro.claims.tolerance import RELATIVE_TOLERANCE, TOLERANCE_POINTS
from repro.config import Layout, OperatorSet
from repro.config.models import load_model
from repro.config.systems import load_system_file
from repro.results.reference_records import REFERENCE_DIRECTORY, load_reference
from repro.results.schema import FitRecord
from repro.results.store import read_records
from repro.simulate.time.calibration import CalibrationPoint, calibration_point_of, calibration_points
from repro.simulate.time.device import DeviceCost, expected_maximum
from repro.simulate.time.network import Network
from repro.simulate.time.predict import predict
from tests import committed
from tests.simulate.time.test_device import product
from tests.test_text import ROOT, tables

LEDGER = committed.ledger()
STORE = os.environ.get("REPRO_STORE", "")
reads_the_store = pytest.mark.skipif(not STORE, reason="REPRO_STORE names no store")
SWEEP = "the same with 3, 4.5, 6, 9, 12 GB/s for a GPU inside its node"


def table(page: str, header: str) -> list[list[str]]:
    """Return the rows of the only table of a page that has this header."""
    (found,) = [body for head, body in tables(ROOT / page) if header in head]
    return found


def codes(cell: str) -> list[str]:
    """Return the texts between backticks in a cell."""
    return cell.split("`")[1::2]


def three_digits(value: float) -> str:
    return f"{Decimal(f'{value:.3g}'):f}"


def test_headline_claims_of_the_readme_equal_the_ledger_and_the_reference_records() -> None:
    """A table of `docs/twin-accuracy.md` has the ratios at other PCIe rates and their commands."""
    lines = headline_lines(LEDGER, judge(LEDGER, [], load_reference()))
    expected = [[line.name, line.published, line.values["emulated"]] for line in lines]
    assert [[*row[:2], row[3]] for row in table("README.md", "verdict")] == expected
    ratios = {row[0]: row[1] for row in table("docs/twin-accuracy.md", "ratio of samples/s")}
    swept = dict(zip(("3", "4.5", "6", "9", "12"), ratios[SWEEP].split(", "), strict=True))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{swept['3']} with 3 GB/s for each GPU, and {swept['6']} with 6 GB/s" in text


@pytest.mark.slow
def test_the_readme_shows_current_simulated_and_measured_values(tmp_path: Path) -> None:
    for arguments in (["--claim", "headlines", "--evidence", "simulated"], ["smoke", "--only", "states-*"]):
        assert cli.main(["run", *arguments, "--results", str(tmp_path)]) == 0
    shown = headline_lines(LEDGER, judge(LEDGER, read_records(tmp_path), load_reference()))
    expected = [[line.values["simulated"], line.values["measured"], line.verdict] for line in shown]
    assert [[row[2], row[4], row[5]] for row in table("README.md", "verdict")] == expected


def test_blind_errors_in_the_docs_equal_the_ledger() -> None:
    """The table of `docs/accuracy.md` has the number of rates and the median error of each group of claims."""
    rows = {row.id: row.rows for row in LEDGER.claims}
    shown = table("docs/accuracy.md", "median error, blind (%)")
    listed = [name for line in shown for name in codes(line[0])]
    assert set(listed) == {name for name, values in rows.items() if any(row.blind for row in values)}
    for line in shown:
        line_rows = [row for name in codes(line[0]) for row in rows[name]]
        ratios = [
            row.printed.value / row.blind.value
            if row.unit in ("s", "ms")
            else row.blind.value / row.printed.value
            for row in line_rows
            if row.blind and row.printed and not row.calibrates and row.metric != "share"
        ]
        errors = [abs(ratio - 1) for ratio in ratios]
        assert line[1:3] == [str(len(errors)), f"{100 * median(errors):.1f}"], line[0]


@pytest.fixture(scope="module")
def published() -> list[Point]:
    """Return all published rates and ratios with their predictions."""
    records = read_records(Path(STORE))
    return points(judge(LEDGER, records, load_reference()), records)


@reads_the_store
def test_errors_by_family_equal_the_store(published: list[Point]) -> None:
    families = family_statistics(published)
    expected = [
        [one.name, *map(str, (one.points, f"{100 * one.median:.1f}", one.close, one.held, one.held_wider))]
        for one in families
        if one.name != PEAK_MEMORY
    ]
    assert table("docs/accuracy.md", "family") == expected
    (ratios,) = [one for one in families if one.name == RATIOS]
    assert sum(one.right_side for one in published if one.kind == RATIO and not one.left_out) == ratios.points


@reads_the_store
def test_errors_of_peak_memory_equal_the_store(published: list[Point]) -> None:
    peaks = [one for one in published if one.kind == MEMORY and not one.left_out]

    def ends(errors: list[float]) -> str:
        return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f}"

    expected = [
        [
            name,
            *map(str, (one.points, f"{100 * one.median:.1f}", one.close)),
            ends([p.error for p in peaks if name in ("all", f"`{p.family}`")]),
        ]
        for name, one in (
            *((f"`{one.name}`", one) for one in source_statistics(published)),
            *(("all", one) for one in family_statistics(published) if one.name == PEAK_MEMORY),
        )
    ]
    assert [row[:5] for row in table("docs/accuracy.md", "source of peak memory")] == expected
    listed = set()
    for patterns, error, _ in table("docs/accuracy.md", "error of the peak (%)"):
        found = [one for one in peaks if fnmatch(one.name, codes(patterns)[0])]
        assert error == ends([one.error for one in found]), patterns
        listed |= {one.name for one in found}
    assert {one.name for one in peaks if abs(one.error) > CLOSE_ERROR} <= listed


@reads_the_store
def test_current_errors_equal_the_store(published: list[Point]) -> None:
    blind = {(claim.id, row.label) for claim in LEDGER.claims for row in claim.rows if row.blind}
    for line in table("docs/accuracy.md", "median error, blind (%)"):
        errors = [
            abs(one.error)
            for one in published
            if one.claim in codes(line[0]) and (one.claim, one.label) in blind and one.left_out != CALIBRATION
        ]
        assert line[3] == (f"{100 * median(errors):.1f}" if errors else "-"), line[0]


@reads_the_store
def test_listed_large_errors_equal_the_store(published: list[Point]) -> None:
    """The table has the smallest and largest error of each row, and names all rates with an error above 25 %."""
    rates = [one for one in published if one.kind == RATE and not one.left_out]
    listed = set()
    for line in table("docs/accuracy.md", "error of the rate (%)"):
        patterns = codes(line[0])
        found = [one for one in rates if any(fnmatch(one.name, pattern) for pattern in patterns)]
        assert all(any(fnmatch(one.name, pattern) for one in found) for pattern in patterns), patterns
        ends = sorted({f"{100 * one.error:+.0f}": one.error for one in found}.items(), key=lambda end: end[1])
        assert line[1] == " to ".join(dict.fromkeys((ends[0][0], ends[-1][0]))), patterns
        listed |= {one.name for one in found}
    assert {one.name for one in rates if abs(one.error) > CLOSE_ERROR} <= listed


def test_step_times_on_one_h200_equal_the_reference_records() -> None:
    """A row names its experiment of each day; a dash marks a day without a record."""
    steps = {
        (file.date, record.name): record.metrics["step_seconds.median"]
        for file in load_reference()
        if file.device == "NVIDIA H200"
        for record in file.records
        if record.kind == "experiment" and record.outcome == "ok"
    }
    page = ROOT / "docs/measurements.md"
    found = 0
    for head, body in tables(page):
        for column, title in enumerate(head):
            if not title.startswith("experiment, "):
                continue
            scale, unit = (1, "s") if head[column + 1].startswith("step time (s)") else (1e3, "ms")
            assert f"({unit})" in head[column + 1]
            for line in body:
                if codes(line[column]):
                    value = steps[title.removeprefix("experiment, "), codes(line[column])[0]]
                    assert line[column + 1] == three_digits(scale * value), line
                    found += 1
    assert found == len(steps) - 5  # other tables have fp16 limits and three checkpointed trainings


@pytest.mark.slow
def test_predicted_steps_on_one_h200_equal_the_system_file(tmp_path: Path) -> None:
    """The predictions are those of `repro validate --system dgx-h200` on a store with the reference records."""
    shutil.copytree(REFERENCE_DIRECTORY, tmp_path / "records")
    pairs = predict_measured_runs(read_records(tmp_path), load_system_file("dgx-h200")).pairs
    expected = {
        pair.name: [
            *(three_digits(1e3 * seconds) for seconds in (pair.measured, pair.predicted)),
            f"{100 * pair.error:+.1f}",
        ]
        for pair in pairs
    }
    for name in ("first-half", "second-half", "undivided"):  # not on the page
        del expected[f"gpu_day/{name}"]
    shown = {codes(line[1])[0]: line[2:5] for line in table("docs/measurements.md", "predicted (ms)")}
    assert shown == expected


def test_memory_on_one_h200_equals_the_reference_records() -> None:
    rows = table("docs/measurements.md", "predicted")
    for column, date in ((2, "2026-11-26"), (3, "2026-11-27")):
        records = [record for file in load_reference() if file.date == date for record in file.records]
        fits = [record.largest for record in records if isinstance(record, FitRecord)]
        limits = {f"{one.layers} layers, {one.memory.cuda['reserved_peak'] / 1e9:.2f} GB" for one in fits}
        assert {row[column] for row in rows[:4]} - {""} == limits
        (step,) = [record.metrics for record in records if record.name in ("pad-fused", "mb8")]
        found = [f"{step[f'memory.{name}_bytes'] / 1e9:.3f} GB" for name in ("peak", "context")]
        assert [row[column] for row in rows[4:]] == found


def test_predictions_of_published_benchmarks_equal_the_page() -> None:
    for system, count, sizes, _, predicted, _ in table("docs/benchmarks.md", "all-reduce (MiB)"):
        network = Network(load_system_file(codes(system)[0]), Layout(dp=int(count)))
        seconds = [network.seconds("all_reduce", "world", int(size) << 20) for size in sizes.split(", ")]
        assert predicted == ", ".join(f"{1e6 * one:.0f}" for one in seconds)
    for system, products, _, predicted, _ in table("docs/benchmarks.md", "product (rows x columns x depth)"):
        device = DeviceCost(load_system_file(codes(system)[0]), "fp16")
        numbers, _, unit = predicted.rpartition(" ")
        for text, number in zip(codes(products), numbers.split(", "), strict=True):
            *batch, rows, columns, depth = map(int, text.split(" x "))
            operator = product(rows, columns, depth, *batch)
            seconds = device.seconds(operator)
            found = {"TFLOP/s": operator.flops / seconds / 1e12, "ms": 1e3 * seconds, "us": 1e6 * seconds}
            decimals = len(number.partition(".")[2])
            assert number == f"{found[unit]:.{decimals}f}", text
    generations = {point.name: point for point in calibration_points()}
    for name, keys, _, predicted in table("docs/benchmarks.md", "keys (count)"):
        point = generations[codes(name)[0]]
        assert point.attention is not None
        peak, start = point.attention.known("attention") / 1e12, point.attention_start
        rates = [peak / (1 + start / int(key)) for key in keys.split(", ")]
        assert predicted == ", ".join(f"{rate:.0f}" for rate in rates)


@pytest.mark.slow
def test_rates_by_bucket_size_equal_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    repro (simulate .*STAGE.*BYTES)$", text.replace("\\\n", ""), re.MULTILINE)
    for row in table("docs/simulate.md", "bucket size (bytes)"):
        for stage, shown in (("0", row[1]), ("2", row[2])):
            words = command.replace("STAGE", stage).replace("BYTES", row[0]).split()
            assert cli.main([*words, "--json"]) == 0
            assert shown == f"{100 * json.loads(capsys.readouterr().out)['time']['mfu']:.1f}"


def test_expected_maxima_of_device_noise_equal_the_page() -> None:
    for devices, mean in table("docs/systems.md", "devices"):
        assert mean == f"{expected_maximum(int(devices.replace(',', ''))):.2f}"


def test_shares_of_copy_bandwidth_equal_the_quotients() -> None:
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    (copy,) = re.findall(r"The copy reached ([\d,]+) GB/s", text)
    rows = table("docs/kernels.md", "share of a copy's bandwidth")
    rates = [float(row[1].replace(",", "")) / float(copy.replace(",", "")) for row in rows]
    assert [row[2] for row in rows] == [f"{100 * rate:.0f} %" for rate in rates]
    missed = sum(100 * rate < int(row[3].split()[0]) for row, rate in zip(rows, rates, strict=True))
    assert (missed, "Eight kernels miss their goal" in text) == (8, True)


def test_tolerances_in_the_docs_equal_the_code() -> None:
    shown = {name: text for classes, text in table("docs/claims.md", "tolerance") for name in codes(classes)}
    assert set(shown) == set(RELATIVE_TOLERANCE)
    for name, value in RELATIVE_TOLERANCE.items():
        points = TOLERANCE_POINTS.get(name)
        expected = f"{points:g} percentage points" if points else f"{100 * value:g} %" if value > 1e-5 else ""
        assert shown[name].startswith(expected), name
        assert ("%" in shown[name]) == expected.endswith("%"), name
    assert shown["parity"].split()[0] == "1e-5"
    assert RELATIVE_TOLERANCE["parity"] == 1e-5


@pytest.mark.slow
def test_kernel_factors_equal_the_calibration_points() -> None:
    rows = [row for row in table("docs/time.md", "calibrated by") if "factors" in row[3]]
    assert [codes(row[0]) for row in rows] == [["fused"], ["fused-2024"]]
    for kernels, _, devices, text in rows:
        assert devices == "A100, H100"
        factors = []
        for system in map(load_system_file, ("selene", "dgx-h100")):
            point = calibration_point_of(OperatorSet(codes(kernels)[0]), system)
            assert isinstance(point, CalibrationPoint)
            prediction = predict(point.experiment(load_model(point.model)), system)
            factors.append(f"{prediction.kernels.products:.2f}")
        assert text.endswith(f"factors {factors[0]} and {factors[1]}")
