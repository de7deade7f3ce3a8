"""Tests of `repro validate` with constructed records: counted and omitted points, statistics and the figure."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.validate import machine as validate_machine
from repro.accuracy.validate import published
from repro.claims.judge import judge
from repro.cli import main
from repro.config.systems import load_system_file as load_system
from repro.report.figures import draw_all, validation
from repro.report.text import validate
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from repro.simulate.record import failed_record
from repro.simulate.time.calibration import BASES, PUBLISHED_POINT, UNCALIBRATED
from tests import committed
from tests.records import changed
from tests.report import synthetic
from tests.report.overlaps import text_layout_errors

pytestmark = pytest.mark.usefixtures("report_style")
LEDGER = committed.ledger()
FOLDER = Path(__file__).parents[2] / "suites"


def record(suite: str, name: str, flops: float, samples: float = 100.0, **memory: float) -> ExperimentRecord:
    """Return a simulated record of a suite's experiment with invented rates and bytes of `memory`."""
    (entry,) = (e for e in committed.suite(FOLDER / f"{suite}.toml").entries if e.experiment.name == name)
    metrics = {
        "hardware_flops_per_s.device": flops,
        "hardware_flops_per_s": flops * entry.experiment.layout.world,
        "samples_per_s": samples,
        "step_seconds.median": entry.experiment.layout.global_batch / samples,
        "model.parameters": 1e9,
        **{f"memory.{name}_bytes": value for name, value in memory.items()},
    }
    made = failed_record(entry.experiment, "", suite=suite, wall_s=0.1)
    return replace(made, outcome="ok", metrics=metrics)


def all_points(*records: ExperimentRecord) -> list[published.Point]:
    return published.points(judge(LEDGER, records), records)


def counted_points(*records: ExperimentRecord) -> list[published.Point]:
    return [point for point in all_points(*records) if not point.left_out]


def write_store(results: Path, *records: ExperimentRecord) -> Path:
    with Store(results) as opened:
        for made in records:
            opened.append(made)
    return results


def test_one_run_counts_once_in_its_family() -> None:
    """The paper prints 142 TFLOP/s per GPU, and the same rate in PFLOP/s of all GPUs and as a share of peak."""
    seen = all_points(record("megatron_2021", "table1-7.5b", 150e12))
    assert {point.runs for point in seen} == {("megatron_2021/table1-7.5b",)}
    (point,) = (point for point in seen if not point.left_out)
    assert (point.unit, point.family, point.kind) == ("TFLOP/s", published.A100_MEGATRON, published.RATE)
    assert point.published == 142
    assert point.error == pytest.approx(150 / 142 - 1)
    assert len(seen) == 3


def test_a_point_has_the_weaker_basis_of_its_runs() -> None:
    """On a V100, Megatron-LM's kernels are calibrated on published points; the fused kernels are not calibrated."""
    megatron, zero = (record("zero_throughput", f"fig2-8b-{name}", 40e12) for name in ("megatron", "zero"))
    assert {point.rests_on for point in all_points(megatron, zero)} == {PUBLISHED_POINT}
    assert zero.experiment.layout.kernels == "unfused"
    layout = {**zero.conditions["layout"], "kernels": "fused"}
    seen = all_points(megatron, changed(zero, experiment={**zero.conditions, "layout": layout}))
    bases = {(point.kind, point.runs): point.rests_on for point in seen}
    assert bases[published.RATE, (zero.label,)] == UNCALIBRATED
    assert bases[published.RATE, (megatron.label,)] == PUBLISHED_POINT
    assert {basis for (kind, _), basis in bases.items() if kind == published.RATIO} == {UNCALIBRATED}


def test_step_times_are_compared_as_rates() -> None:
    (point,) = counted_points(record("yuan", "yuan-245b", 1e12, samples=3360 / 50))
    assert (point.unit, point.published, point.predicted) == ("s", 46.20, 50)
    assert point.error == pytest.approx(46.20 / 50 - 1)


def test_calibration_values_and_bounds_are_omitted() -> None:
    base = record("megatron_2019", "meg1-1.2b-mp1", 39e12)
    assert {point.left_out for point in all_points(base)} == {published.CALIBRATION}
    seen = all_points(record("zero_throughput", "fig2-100b-zero", 40e12))
    reasons = {point.label: point.left_out for point in seen if point.claim == "zero-fig2-throughput"}
    bounds = dict.fromkeys(("100B per GPU (text)", "100B on 400 GPUs (text)"), published.BOUND)
    assert reasons == {**bounds, "100B: ZeRO per GPU": ""}


def test_ratios_have_two_runs_and_a_side_of_one() -> None:
    both = [record("deepspeed_64gpu", f"64gpu-4b-{who}", 1e12) for who in ("deepspeed", "megatron")]
    for megatron, right in ((50, True), (120, False)):
        both[1].metrics["samples_per_s"] = megatron
        (point,) = (point for point in counted_points(*both) if point.kind == published.RATIO)
        assert point.name == "ds-64gpu-table/4B:-DeepSpeed-over-Megatron"
        assert (point.kind, point.family, point.right_side) == (published.RATIO, published.V100_ZERO, right)
        assert point.predicted == 100 / megatron


def test_gains_in_percent_are_not_ratios() -> None:
    """+19 % published and +7 % predicted differ by 12 points, although the ratios 1.19 and 1.07 are close."""
    both = [record("megatron_2021", f"gpt3-1024{kernels}", 1e12) for kernels in ("", "-unfused")]
    both[0].metrics["hardware_flops_per_s.device"] = 1.07e12
    gains = {(point.claim, point.label): point for point in all_points(*both)}
    gain = gains["meg2-fused-kernels", "175B"]
    assert (gain.left_out, gain.predicted) == (published.GAIN, pytest.approx(7))


def test_peak_memory_has_an_error_limit_and_source_statistics() -> None:
    """Published: 15,215.4 and 16,713.4 MiB allocated, 29 GiB used, and 24.2 GB in the caching allocator."""
    seen = all_points(
        record("memory", "vocabulary-32k-s2048", 1e12, peak=15215.4 * 1.04 * 2**20),
        record("memory", "vocabulary-64k-s2048", 1e12, peak=16713.4 * 0.94 * 2**20),
        record("memory", "bloom-181b-dp4-tp8-pp12-mb1", 1e12, used=29 * 2**30),
        record("zero_r", "fig7-c2-40b", 1e12, reserved=24.2e9 / 2),
    )
    peaks = [point for point in seen if point.kind == published.MEMORY]
    assert [point.error for point in peaks] == pytest.approx([-0.5, 0.04, -0.06, 0.0], abs=1e-6)
    by_name = {family.name: family for family in published.family_statistics(seen)}
    assert (by_name["peak memory"].points, by_name["peak memory"].close) == (4, 2)
    by_source = {source.name: (source.points, source.close) for source in published.source_statistics(seen)}
    assert by_source == {"ZERO3": (1, 0), "VOCAB": (2, 1), "BIGSCIENCE": (1, 1)}
    assert not any(
        p.kind == published.MEMORY for p in all_points(record("megatron_2021", "table1-7.5b", 150e12))
    )


def test_families_have_median_and_worst_errors() -> None:
    seen = all_points(
        record("zero_throughput", "fig2-8b-megatron", 23.2e12 * 1.1),
        record("zero_throughput", "fig2-40b-megatron", 5.0e12 * 2),
        record("zero_throughput", "fig2-8b-zero", 36.9e12 * 0.95),
    )
    by_name = {family.name: family for family in published.family_statistics(seen)}
    assert set(by_name) == {published.V100_MEGATRON, published.V100_ZERO, "all rates", "ratios"}
    assert by_name[published.V100_MEGATRON].median == pytest.approx(0.55)
    assert (by_name["all rates"].points, by_name["all rates"].close) == (3, 2)
    assert by_name["all rates"].median == pytest.approx(0.1)
    assert by_name["all rates"].worst.label == "40B: baseline per GPU"
    assert published.family_statistics([]) == []
    (slow, _) = published.family_statistics(
        all_points(record("zero_throughput", "fig2-8b-megatron", 23.2e12 * 0.6))
    )
    assert (slow.points, slow.close, slow.median) == (1, 0, pytest.approx(0.4))


def test_validate_command_prints_text_json_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(
        tmp_path / "results",
        record("zero_throughput", "fig2-8b-megatron", 20e12),
        record("zero_throughput", "fig2-8b-zero", 40e12),
        record("megatron_2019", "meg1-1.2b-mp1", 39e12),
    )

    def printed(*options: str) -> str:
        assert main(["validate", "--results", str(store), *options]) == 0
        return capsys.readouterr().out

    text = printed("--svg", str(tmp_path / "x.svg"))
    assert "1 of 1 ratios are on the same side of 1 as published" in " ".join(text.split())
    assert "Omitted: calibration values" not in text
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    monkeypatch.setenv("COLUMNS", "200")
    text = printed("--details")
    assert "Omitted: calibration values" in text
    assert re.search(r"8B: speed-up .* published *\n", text)
    assert BASES[PUBLISHED_POINT] in " ".join(text.split())
    assert BASES[UNCALIBRATED] not in " ".join(text.split()), "no record has this basis"
    document = json.loads(printed("--json"))
    assert document["calibration"] == ["meg1-baseline-39tf/one-GPU"]
    assert [point["name"] for point in document["points"] if point["counts"]] == [
        "zero-fig2-throughput/8B:-ZeRO-per-GPU",
        "zero-fig2-throughput/8B:-baseline-per-GPU",
        "zero-fig2-throughput/8B:-speed-up",
    ]
    assert "--evidence simulated" in printed("--results", str(tmp_path)), "a store without predictions"
    picture = ["--svg", str(tmp_path / "y.svg")]
    assert main(["validate", "--results", str(tmp_path), *picture]) == 2
    assert "error: --svg" in capsys.readouterr().err


def test_large_errors_are_explained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """80B and 100B share one explanation; 8B has a small error; a calibration value has no side of 1."""
    rates = {"80b-megatron": 2e12, "100b-megatron": 2e12, "8b-zero": 36.9e12}
    records = [record("zero_throughput", f"fig2-{name}", flops) for name, flops in rates.items()]
    write_store(tmp_path, *records, record("megatron_2019", "dec2020-v100-1b", 71.9e12))
    assert main(["validate", "--results", str(tmp_path), "--details"]) == 0
    text = capsys.readouterr().out
    assert "other side of 1" not in text
    section = text.partition("rows with an error above 25 %")[2].partition("in wider interval")[0]
    output = " ".join(section.split())
    assert output.count("The simulated collective spans all nodes") == 1
    assert "8B: ZeRO" not in output
    assert {size for size in ("80B", "100B") if f"{size}: baseline" in output} == {"80B", "100B"}


def test_figure_shows_only_counted_points_and_names_their_families() -> None:
    seen = all_points(
        record("zero_throughput", "fig2-8b-megatron", 40e12),
        record("zero_throughput", "fig2-8b-zero", 40e12),
        record("megatron_2019", "meg1-1.2b-mp1", 39e12),
    )
    drawing: Any = draw_all([], [], (), seen)[-1]
    assert drawing.records == ("zero_throughput/fig2-8b-megatron", "zero_throughput/fig2-8b-zero")
    left, right = drawing.figure.axes
    texts = [text.get_text() for axes in (left, right) for text in axes.texts]
    assert "zero-fig2-throughput, 8B" in texts
    assert left.get_legend() is None, "a legend inside a panel would cover labels"
    rate = next(point for point in seen if not point.left_out)
    every: Any = validation.draw_validation([replace(rate, family=name) for name in published.FAMILIES])
    names = [published.V100_MEGATRON, published.V100_ZERO]
    for figure, families in ((drawing.figure, names), (every.figure, list(published.FAMILIES))):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == families
        assert text_layout_errors(figure) == []
    assert validation.draw_validation([]).missing == validation.VALIDATION_COMMAND


def test_figure_has_a_vertical_line_for_each_interval() -> None:
    """Intervals are in TFLOP/s of a device; the longest published step time is the lowest rate."""
    (rate,) = counted_points(record("zero_throughput", "fig2-8b-zero", 40e12))
    (time,) = counted_points(record("yuan", "yuan-245b", 100e12, samples=3360 / 50))
    intervals = [replace(rate, low=30.0, high=44.0), replace(time, low=40.0, high=80.0)]
    drawn: Any = validation.draw_validation(intervals)
    lines = drawn.figure.axes[0].lines
    vertical = [sorted(line.get_ydata()) for line in lines if len(set(line.get_xdata())) == 1]
    assert vertical == [pytest.approx([30, 44]), pytest.approx([100 * 50 / 80, 100 * 50 / 40])]


def test_margins_come_from_other_reports_only() -> None:
    """Each row of one report has the margin of the other report; omitted rows have no margin."""
    sizes = "1.7b 3.6b 7.5b 18.4b 39.1b 76.1b 145.6b 310.1b 529.6b 1t"
    of_one = [record("megatron_2021", f"table1-{size}", 150e12) for size in sizes.split()]
    sizes = "1.5b 8b 40b 60b 80b 100b 120b 140b 170b"
    others = [record("zero_throughput", f"fig2-{size}-zero", 30e12) for size in sizes.split()]
    seen = all_points(*of_one, *others)
    rates = [point for point in seen if point.kind == published.RATE and not point.left_out]
    reports = {("MEG2" in point.reports, "ZERO3" in point.reports) for point in rates}
    assert reports == {(True, False), (False, True)}
    for point in rates:
        others_of_point = [other for other in rates if not other.reports & point.reports]
        scores = [
            published.conformity_score(other.low, other.high, other.published) for other in others_of_point
        ]
        assert point.margin == published.conformal_margin(scores) is not None
        assert point.wider == pytest.approx((point.low * exp(-point.margin), point.high * exp(point.margin)))
    assert all(point.margin is None for point in seen if point.left_out)
    (family,) = (one for one in published.family_statistics(seen) if one.name == "all rates")
    assert (family.wider, family.held_wider) == (len(rates), sum(point.holds_wider for point in rates))
    assert sum(claim.points for claim in published.claim_statistics(seen)) == sum(
        not point.left_out for point in seen
    )


def test_measured_runs_are_predicted_on_a_system_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only runs of this machine with outcome ok are predicted; a run without a prediction has a reason."""
    names = ("parity-single", "parity-z1-dp2", "states-z1-dp2", "limit-z0-dp2")
    records = [record for record in synthetic.records() if record.name in names]
    machine = validate_machine.predict_measured_runs(records, load_system("dgx2"))
    measured = {record.label: record.metrics for record in records}
    assert {pair.name: pair.layout for pair in machine.pairs} == {
        "smoke/parity-single": "one rank, fp32",
        "smoke/parity-z1-dp2": "dp 2, ZeRO 1, fp32",
    }
    for pair in machine.pairs:
        assert pair.measured == measured[pair.name]["step_seconds.median"]
        assert pair.error == pytest.approx(pair.predicted / pair.measured - 1)
    (why,) = machine.missing.values()  # bf16, which a V100 does not have
    assert "bf16" in why
    write_store(tmp_path, *records)
    assert main(["validate", "--results", str(tmp_path), "--system", "dgx2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["machine"]
    assert {pair["rests_on"] for pair in document["pairs"]} == {UNCALIBRATED}
    assert document["median_error"] == pytest.approx(machine.median)
    assert validate.validation_document([], machine)["machine"] == document
