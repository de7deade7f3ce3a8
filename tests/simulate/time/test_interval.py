"""Tests of the interval of a step time: cases in one pass, its ends, curves, and calibrated kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np
import pytest

from repro.config import Experiment, Layout, Model, OperatorSet, models
from repro.config.system import System
from repro.config.systems import load_system_file
from repro.config.systems.unknowns import BEST, HIGH, LOW, drawn, quantiles_in_cases, unknowns, with_values
from repro.model import counts
from repro.results.interval import likely_range, possible_range
from repro.simulate.time.calibration import (
    CalibrationPoint,
    Generation,
    MeasuredKernels,
    calibration_point_of,
    calibration_points,
    measured_kernels,
    uncertain_numbers,
)
from repro.simulate.time.device import MODELLED_KERNELS, Kernels
from repro.simulate.time.predict import (
    MIN_CURVE_SPAN,
    Prediction,
    calibrated_kernels,
    calibrated_kernels_at,
    kernels_in_cases,
    predict,
    round_seconds,
)
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.trace.roles import Trace, trace_roles
from tests.config.test_unknowns import array_values, system_of_case
from tests.simulate.time.networks import use_exact_kernels

MODEL = Model(name="small", layers=8, hidden=2048, heads=16, vocab=50304, seq=1024)
LAYOUTS = {
    "zero1": Layout(dp=32, zero=1, micro_batch=2, precision="fp16", kernels="softmax"),
    "zero3": Layout(dp=32, zero=3, micro_batch=2, precision="fp16", kernels="unfused", recompute=True),
    "tp": Layout(dp=4, tp=8, micro_batch=2, global_batch=16, precision="fp16", kernels="softmax"),
    "pp": Layout(dp=8, tp=2, pp=4, micro_batch=1, global_batch=64, precision="fp16", kernels="softmax"),
    "interleaved": Layout(
        dp=2, tp=4, pp=4, chunks=2, schedule="interleaved", micro_batch=1, global_batch=16, precision="fp16",
        kernels="softmax", scatter_gather=True,
    ),
}  # fmt: skip


@cache
def traced(name: str) -> tuple[Experiment, list[Trace]]:
    experiment = Experiment(name=name, model=MODEL, layout=LAYOUTS[name], system="dgx2")
    return experiment, trace_roles(experiment)


DGX2 = load_system_file("dgx2")
EXACT = with_values(DGX2, {one.key: one.best for one in unknowns(DGX2)})
"""The system with its best values and without ranges."""


@cache
def predicted(name: str) -> Prediction:
    """Return the prediction on a DGX-2, with an interval."""
    experiment, traces = traced(name)
    return predict(experiment, DGX2, traces, interval=True)


def ranged(key: str, low: float, high: float) -> System:
    """Return `EXACT` with a range of one key of `device.time`."""
    time = EXACT.device.time
    number = replace(getattr(time, key), low=low, high=high, source="low: x; high: x")
    return replace(EXACT, device=replace(EXACT.device, time=replace(time, **{key: number})))


def kernels_of(kernels: Kernels, case: int) -> Kernels:
    return Kernels(*(np.ravel(one)[case if np.ndim(one) else 0].item() for one in kernels))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_pass_equals_separate_predictions_of_all_cases(name: str) -> None:
    """The systems have uncertain inputs of all kinds. Jitter must not change cached times of collectives."""
    experiment, traces = traced(name)
    systems = map(load_system_file, ("dgx2", "selene", "gb200-nvl72", "mi300x", "vtrain-a100"))
    for system in (*systems, with_values(DGX2, {"device.time.jitter_s": 1e-6})):
        generation = calibration_point_of(experiment.layout.kernels, system)
        found = tuple(uncertain_numbers(system, generation))
        in_cases, kernels = drawn(system, quantiles_in_cases(found)), kernels_in_cases(generation, found)
        together = schedule_traces(experiment, in_cases, traces, kernels).seconds
        in_system = {one.key for one in found if one.key.startswith(("device.", "links."))}
        assert set(array_values(in_cases)) == in_system
        for case in (0, 40, 111, -1, -17, -33):
            exact, efficiency = system_of_case(in_cases, case), kernels_of(kernels, case)
            alone = predict(experiment, exact, traces, kernels=efficiency)
            assert together[case] == pytest.approx(alone.step_s, rel=1e-12), (system.name, case)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_interval_contains_the_best_value_within_possible_times(name: str) -> None:
    found = predicted(name)
    low, high = likely_range(found.interval.draws, found.step_s)
    minimum, maximum = possible_range(found.interval.cases(), found.step_s)
    assert minimum <= low <= found.step_s <= high <= maximum
    assert low < high
    spans = [move.span for move in found.interval.moves]
    assert spans == sorted(spans, reverse=True)
    assert all(span > 0 for span in spans), "unknowns without effect are not listed"


def test_an_interval_needs_a_request_and_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """One uncertain input decides the interval, although the system of the calibration point has other unknowns."""
    use_exact_kernels(monkeypatch)
    experiment, traces = traced("pp")
    one_range = ranged("kernel_s", 2.0e-6, 2.9e-6)
    assert predict(experiment, EXACT, traces, interval=True).interval is None
    assert predict(experiment, one_range, traces).interval is None
    found = predict(experiment, one_range, traces, interval=True)
    moves = found.interval.moves
    assert {move.key for move in moves} <= {"device.time.kernel_s", f"{found.generation.name}: FLOP/s"}
    low, high = likely_range(found.interval.draws, found.step_s)
    ends = [found.step_s, *(end for move in moves for end in (move.low_s, move.high_s))]
    slack = 0.01 * found.step_s
    assert min(ends) - slack <= low
    assert high <= max(ends) + slack


def with_equal_factors(found: Kernels) -> Kernels:
    """Return kernels whose products have the factor of other kernels."""
    return found._replace(products=found.others)


def kernels_at(generation: Generation, key: str, *quantiles: float) -> list[Kernels]:
    """Return the calibrated kernels with one uncertain input at each of `quantiles`."""
    found = calibrated_kernels_at(generation, {key: np.array(quantiles)})
    return [kernels_of(found, case) for case in range(len(quantiles))]


def test_a_calibration_point_compensates_unknowns_of_its_device() -> None:
    """The calibrating run has its published time with any efficiency of products. Kernels that are faster than the
    model have equal factors."""
    for point in calibration_points():
        if "V100" in point.name:
            slow, best = kernels_at(point, "device.time.matmul_efficiency", LOW, BEST)
            assert slow < best, "slower products leave less time to the software"
            assert best == with_equal_factors(calibrated_kernels(point))
    fast = replace(calibration_points()[0], flops_per_device=90e12, low=None, high=None)
    slow, best = kernels_at(fast, f"{fast.name}: products", LOW, BEST)
    assert slow == best == with_equal_factors(best)
    assert best.others < 1


@pytest.mark.parametrize(
    "point",
    [point for point in calibration_points() if point.layout.world == 1],
    ids=lambda point: point.name,
)
def test_any_split_of_kernel_factors_reproduces_the_published_rate(point: CalibrationPoint) -> None:
    """One rate does not decide which kernels are slow: with fast products, other kernels take the remaining time.

    Outside the range, where searches try values, products are slower than other kernels.
    """
    model, best = models.load_model(point.model), calibrated_kernels(point)
    experiment = point.experiment(model)
    exact = {"device.time.pace": 1.0, "device.time.spread": 0.0}
    alone, traces = with_values(load_system_file(point.system), exact), trace_roles(experiment)
    work = counts.hardware_flops(model, model.seq, point.layout.global_batch, recompute=True)
    quantiles = (LOW, 0.2, 0.4, BEST, 1.25, 2.0)
    for quantile, found in zip(
        quantiles, kernels_at(point, f"{point.name}: products", *quantiles), strict=True
    ):
        seconds = schedule_traces(experiment, alone, traces, found).seconds
        assert seconds == pytest.approx(work / point.flops_per_device, rel=1e-3)
        if best.others < 1:  # faster than the model, with equal factors
            assert found == best
            continue
        assert (found.products < best.products and found.others > best.others) == (quantile < BEST)
        assert min(found.products, found.others) >= 1
        assert (found.products <= found.others) == (quantile <= HIGH)


def test_network_pace_and_kernels_without_a_point_are_unknowns() -> None:
    """The calibration point does not compensate the network and the pace."""
    found = predicted("zero1")
    moves = {move.key: move for move in found.interval.moves}
    rings, pace = moves["links.inter-node.rings"], moves["device.time.pace"]
    assert rings.span / found.step_s > 0.2, "messages dominate: small products and a slow network"
    assert pace.low_s < pace.high_s
    experiment, traces = traced("zero1")
    fused = replace(experiment, layout=replace(experiment.layout, kernels="fused"))
    found = predict(fused, DGX2, traces, interval=True)
    (products,) = (move for move in found.interval.moves if move.key == "kernels of other devices: products")
    assert products.low_s < found.step_s < products.high_s


def test_uncalibrated_kernels_have_twice_the_range_of_all_points() -> None:
    """The range is logarithmic around the median. Attention is a share of the device's peak, and at most the peak."""
    b200 = load_system_file("dgx-b200")
    found = calibration_point_of(OperatorSet.FUSED, b200)
    assert isinstance(found, MeasuredKernels)
    generations = [*calibration_points(), *measured_kernels()]
    kernels = [calibrated_kernels(generation) for generation in generations]
    peaks = {"7.0": 125e12, "8.0": 312e12, "9.0": 989.4e12, "10.0": 2250e12}
    values = {name: [getattr(one, name) for one in kernels] for name in ("products", "others", "passes")}
    values["attention"] = [
        one.attention / peaks[generation.compute_capability]
        for one, generation in zip(kernels, generations, strict=True)
        if one.attention
    ]
    for name, of_all in values.items():
        unit, most = (b200.peak("bf16"), 1.0) if name == "attention" else (1.0, 9.0)
        low, middle, high = (end / unit for end in getattr(found, name).ends)
        assert middle == pytest.approx(median(of_all), rel=0.01)
        assert low == pytest.approx(min(of_all) ** 2 / middle, rel=0.03)
        assert high == pytest.approx(min(max(of_all) ** 2 / middle, most), rel=0.03)


def test_a_rounded_published_rate_is_a_separate_unknown() -> None:
    (rounded,) = (p for p in calibration_points() if p.claim == "meg1-baseline-39tf")
    key = rounded.rate.key
    assert key in {one.key for one in uncertain_numbers(load_system_file("dgx2h"), rounded)}
    low, high = kernels_at(rounded, key, HIGH, LOW)
    # The rate does not change passes over parameters, seven percent of the step.
    assert 39.5 / 38.5 < high.others / low.others < 1 + 1.1 * (39.5 / 38.5 - 1)
    assert rounded.rate.best == 39e12


@pytest.mark.parametrize("name", ["zero1", "tp"])
def test_a_curve_gives_the_step_time_of_any_value(name: str) -> None:
    """A point of the curve is the step time of a system with this value, inside or outside the range.

    Unknowns with a small effect have no curve.
    """
    moves = predicted(name).interval.moves
    for move in moves:
        assert (move.curve is not None) == (move.span > MIN_CURVE_SPAN * min(move.low_s, move.high_s))
    curves = {move.key: move for move in moves if move.curve}
    assert 0 < len(curves) < len(moves)
    for move in curves.values():
        values = [value for value, _ in move.curve]
        assert values == sorted(set(values))
        assert {move.low, move.best, move.high} <= set(values)
        ends = [move.seconds_at(move.low), move.seconds_at(move.high)]
        assert ends == pytest.approx([move.low_s, move.high_s], rel=1e-6)
    if name == "zero1":  # long collectives between nodes
        assert {*range(1, 9)} <= {value for value, _ in curves["links.inter-node.rings"].curve}
    pace = curves["device.time.pace"]
    assert min(pace.curve)[0] == pytest.approx(0.92 / 4)
    experiment, traces = traced(name)
    for value in (0.7, 1.0, 1.3):
        alone = predict(experiment, with_values(DGX2, {"device.time.pace": value}), traces).step_s
        assert pace.seconds_at(value) == pytest.approx(alone, rel=1.5e-2), value


def test_searched_values_are_valid_numbers_of_a_system() -> None:
    """The constructors of a system's parts check the numbers again."""
    for name in ("dgx2", "selene", "lowbw-v100"):
        system = load_system_file(name)
        for one in unknowns(system):
            values = list(one.around)
            assert values == sorted(values)
            assert values[0] <= one.low < one.high <= values[-1]
            assert one.values_at(list(one.around.values())).tolist() == values
            for value in (values[0], values[-1]):
                changed = with_values(system, {one.key: value})
                for part in (changed.device.time, *changed.links.values()):
                    replace(part)


def test_seconds_are_rounded_to_seven_digits() -> None:
    assert [round_seconds(2 / 3), round_seconds(2e9 / 3)] == [0.6666667, 666666700.0]


def test_overlap_cost_slows_only_steps_with_overlap() -> None:
    """Data-parallel messages overlap with the backward pass. Without overlap, the cost has no effect."""
    experiment, traces = traced("zero1")
    cost, costs = "links.inter-node.overlap_cost", (0.0, 0.025, 0.2)
    systems = [with_values(DGX2, {cost: value}) for value in costs]
    steps = [schedule_traces(experiment, one, traces, MODELLED_KERNELS).step_s for one in systems]
    assert steps[0] < steps[1] < steps[2]
    plain = replace(experiment, layout=replace(experiment.layout, overlap=False))
    alone = trace_roles(plain)
    assert len({schedule_traces(plain, one, alone, MODELLED_KERNELS).step_s for one in systems}) == 1
