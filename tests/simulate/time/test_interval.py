"""Tests of the interval of a step time: it contains the best value, grows with ranges and is absent without ranges."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import Experiment, Layout, Model, OperatorSet, models
from repro.config.quantity import Quantity
from repro.config.suites import load_suite
from repro.config.system import System
from repro.config.systems import load_system_file
from repro.config.systems.unknowns import (
    BEST,
    HIGH,
    LOW,
    drawn,
    quantiles_in_cases,
    unknowns,
    with_values,
)
from repro.model import counts
from repro.results.interval import StepInterval, likely_range, possible_range
from repro.simulate.step import simulate
from repro.simulate.time.calibration import (
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
    calibrated_kernels,
    calibrated_kernels_at,
    interval_of_seconds,
    kernels_in_cases,
    predict,
    round_seconds,
)
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.trace.roles import Trace, trace_roles
from tests.config.system_arrays import array_values, system_of_case
from tests.simulate.exact import use_exact_kernels

SUITES = Path(__file__).parents[3] / "suites"
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


def exact(system: System) -> System:
    """Return `system` with its best values and without ranges."""
    return with_values(system, {one.key: one.best for one in unknowns(system)})


def ranged(system: System, key: str, low: float, high: float) -> System:
    """Return `exact(system)` with a range of one key of `device.time`."""
    known = exact(system)
    number = replace(getattr(known.device.time, key), low=low, high=high, source="low: x; high: x")
    return replace(known, device=replace(known.device, time=replace(known.device.time, **{key: number})))


def kernels_of(kernels: Kernels, case: int) -> Kernels:
    """Return the kernels of one case."""
    return Kernels(*(np.ravel(one)[case if np.ndim(one) else 0].item() for one in kernels))


def assert_equals_single_cases(
    experiment: Experiment, system: System, traces: list[Trace], cases: list[int]
) -> None:
    """Require that one pass over all cases gives the step times of separate predictions without arrays."""
    generation = calibration_point_of(experiment.layout.kernels, system)
    found = tuple(uncertain_numbers(system, generation))
    in_cases, kernels = drawn(system, quantiles_in_cases(found)), kernels_in_cases(generation, found)
    together = schedule_traces(experiment, in_cases, traces, kernels).seconds
    assert set(array_values(in_cases)) == {
        one.key for one in found if one.key.startswith(("device.", "links."))
    }
    for case in cases:
        alone = predict(experiment, system_of_case(in_cases, case), traces, kernels=kernels_of(kernels, case))
        assert together[case] == pytest.approx(alone.step_s, rel=1e-12), case  # type: ignore[index]


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_pass_equals_separate_predictions_of_all_cases(name: str) -> None:
    experiment, traces = traced(name)
    for system in (
        "dgx2",
        "selene",
        "gb200-nvl72",
        "mi300x",
        "vtrain-a100",
    ):  # these have unknown numbers of all kinds
        assert_equals_single_cases(experiment, load_system_file(system), traces, [0, 40, 111, -1, -17, -33])


def test_jitter_does_not_change_cached_collective_times() -> None:
    """A cache contains the arrays of repeated collectives, without the delay of the last rank."""
    experiment, traces = traced("tp")
    system = with_values(load_system_file("dgx2"), {"device.time.jitter_s": 1e-6})
    assert_equals_single_cases(experiment, system, traces, [0, 40, -1])


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_equals_separate_predictions_of_published_experiments(seed: int) -> None:
    random = Random(seed)
    suites = ("megatron_2019", "zero_throughput", "v100_clusters", "a100_clusters", "one_node", "today")
    suite = load_suite(SUITES / f"{random.choice(suites)}.toml")
    experiment = random.choice(
        [entry.experiment for entry in suite.entries if entry.experiment.layout.pp < 8]
    )
    experiment = replace(experiment, model=replace(experiment.model, layers=experiment.layout.pp * 2))
    traces = trace_roles(experiment)
    cases = [random.randrange(200) for _ in range(8)]
    assert_equals_single_cases(experiment, load_system_file(experiment.system), traces, cases)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_interval_contains_the_best_value_within_possible_times(name: str) -> None:
    experiment, traces = traced(name)
    found = predict(experiment, load_system_file("dgx2"), traces, interval=True)
    assert found.interval is not None
    low, high = likely_range(found.interval.draws, found.step_s)
    minimum, maximum = possible_range(found.interval.cases(), found.step_s)
    assert minimum <= low <= found.step_s <= high <= maximum
    assert low < high
    spans = [move.span for move in found.interval.moves]
    assert spans == sorted(spans, reverse=True)
    assert all(span > 0 for span in spans), "unknowns without effect are not listed"


def test_exact_numbers_give_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_kernels(monkeypatch)
    experiment, traces = traced("tp")
    assert predict(experiment, exact(load_system_file("dgx2")), traces, interval=True).interval is None
    assert (
        predict(
            experiment, ranged(load_system_file("dgx2"), "launch_s", 7e-6, 8e-6), traces, interval=True
        ).interval
        is not None
    )


@pytest.mark.parametrize("name", ["tp", "pp"])
def test_known_numbers_apply_to_the_calibration_system_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unknown number decides the interval, although the system of the calibration point has other unknowns."""
    use_exact_kernels(monkeypatch)
    experiment, traces = traced(name)
    system = ranged(load_system_file("dgx2"), "kernel_s", 2.0e-6, 2.9e-6)
    found = predict(experiment, system, traces, interval=True)
    assert found.interval is not None
    assert {move.key for move in found.interval.moves} <= {
        "device.time.kernel_s",
        f"{found.generation.name}: FLOP/s",
    }  # type: ignore[union-attr]
    (low, high), ends = likely_range(found.interval.draws, found.step_s), [found.step_s]
    for move in found.interval.moves:
        ends += [move.low_s, move.high_s]
    slack = 0.01 * found.step_s
    assert min(ends) - slack <= low
    assert high <= max(ends) + slack


@pytest.mark.parametrize("key", ["matmul_efficiency", "memory_efficiency"])
def test_a_known_number_does_not_widen_the_interval(key: str) -> None:
    """A published point of another system with the same devices calibrates the kernels."""
    experiment, traces = traced("tp")
    system = load_system_file("dgx2")
    known = with_values(system, {f"device.time.{key}": getattr(system.timing, key)})
    step = predict(experiment, system, traces, interval=True)
    exact_ = predict(experiment, known, traces, interval=True)
    assert step.interval is not None
    assert exact_.interval is not None
    (low, high), (wide_low, wide_high) = (
        likely_range(exact_.interval.draws, step.step_s),
        likely_range(step.interval.draws, step.step_s),
    )
    assert high - low <= (wide_high - wide_low) * 1.02


def test_an_interval_is_computed_only_on_request() -> None:
    experiment = Experiment(name="e", model=replace(MODEL, layers=2), layout=LAYOUTS["zero1"], system="dgx2")
    found = simulate(experiment, load_system_file("dgx2"), time=True).time
    assert found is not None
    assert found.interval is None
    assert not found.timeline.spans


def uncalibrated_interval(experiment: Experiment, system: System, traces: list[Trace]) -> StepInterval:
    """Return the interval with modelled kernels, which no calibration point corrects."""
    found = unknowns(system)
    in_cases = drawn(system, quantiles_in_cases(found))
    return interval_of_seconds(found, schedule_traces(experiment, in_cases, traces, MODELLED_KERNELS).seconds)


@settings(max_examples=12)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(0, 0.4), st.floats(0, 0.2), st.floats(0.3, 0.9))
def test_a_wider_range_does_not_narrow_an_interval(name: str, down: float, up: float, part: float) -> None:
    experiment, traces = traced(name)
    system = load_system_file("dgx2")
    best = system.timing.matmul_efficiency
    wide = ranged(system, "matmul_efficiency", best * (1 - down), min(1, best * (1 + up)))
    narrow = ranged(system, "matmul_efficiency", best * (1 - part * down), min(1, best * (1 + part * up)))
    step = schedule_traces(experiment, system, traces, MODELLED_KERNELS).step_s
    outer, inner = (uncalibrated_interval(experiment, one, traces) for one in (wide, narrow))
    slack = 1e-6 * step
    likely = [likely_range(one.draws, step) for one in (inner, outer)]
    possible = [possible_range(one.cases(), step) for one in (inner, outer)]
    for (low, high), (outer_low, outer_high) in (likely, possible):
        assert outer_low <= low + slack
        assert high <= outer_high + slack


def with_equal_factors(found: Kernels) -> Kernels:
    """Return kernels whose products have the factor of other kernels."""
    return found._replace(products=found.others)


def kernels_at(generation: Generation, key: str, *quantiles: float) -> list[Kernels]:
    """Return the calibrated kernels with one unknown number at each of `quantiles`."""
    found = calibrated_kernels_at(generation, {key: np.array(quantiles)})
    return [kernels_of(found, case) for case in range(len(quantiles))]


def test_a_calibration_point_compensates_unknowns_of_its_device() -> None:
    """The calibrating run has its published time with any efficiency of products."""
    for point in calibration_points():
        if "V100" not in point.name:
            continue
        key = "device.time.matmul_efficiency"
        slow, best = kernels_at(point, key, LOW, BEST)
        assert slow < best, "slower products leave less time to the software"
        assert best == with_equal_factors(calibrated_kernels(point))


@pytest.mark.parametrize("quantile", [LOW, 0.2, 0.4, BEST, 1.25, 2.0])
def test_any_split_of_kernel_factors_reproduces_the_published_rate(quantile: float) -> None:
    """One rate does not decide which kernels are slow: with fast products, other kernels take the remaining time.

    Outside the range, where searches try values, products are slower than other kernels.
    """
    for point in calibration_points():
        if point.layout.world > 1:
            continue
        model = models.load_model(point.model)
        experiment = replace(point.experiment(model), name=f"published {point.name}")
        alone = with_values(
            load_system_file(point.system), {"device.time.pace": 1.0, "device.time.spread": 0.0}
        )
        (found,) = kernels_at(point, f"{point.name}: products", quantile)
        seconds = schedule_traces(experiment, alone, trace_roles(experiment), found).seconds
        work = counts.hardware_flops(model, model.seq, point.layout.global_batch, recompute=True)
        assert seconds == pytest.approx(work / point.flops_per_device, rel=1e-3)
        best = calibrated_kernels(point)
        if best.others < 1:  # faster than the model, with equal factors
            assert found == best
            continue
        assert (found.products < best.products and found.others > best.others) == (quantile < BEST)
        assert min(found.products, found.others) >= 1
        assert (found.products <= found.others) == (quantile <= HIGH)


def test_kernels_faster_than_the_model_have_equal_factors() -> None:
    point = replace(calibration_points()[0], flops_per_device=90e12, low=None, high=None)
    slow, best = kernels_at(point, f"{point.name}: products", LOW, BEST)
    assert slow == best == with_equal_factors(best)
    assert best.others < 1


def test_network_unknowns_remain_in_a_calibrated_interval() -> None:
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    found = predict(experiment, system, traces, interval=True)
    assert found.interval is not None
    keys = {move.key: move.span / found.step_s for move in found.interval.moves}
    assert keys["links.inter-node.rings"] > 0.2, "messages dominate: small products and a slow network"
    assert found.generation is not None
    slow, best = kernels_at(found.generation, "device.time.matmul_efficiency", LOW, BEST)
    assert slow.others < best.others


def test_pace_and_kernels_without_a_point_are_unknowns() -> None:
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    calibrated = predict(experiment, system, traces, interval=True)
    assert calibrated.interval is not None
    (pace,) = (move for move in calibrated.interval.moves if move.key == "device.time.pace")
    assert pace.low_s < pace.high_s, "the calibration point does not compensate the pace"
    fused = replace(experiment, layout=replace(experiment.layout, kernels="fused"))
    found = predict(fused, system, traces, interval=True)
    assert found.interval is not None
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
    shares = [
        one.attention / peaks[generation.compute_capability]
        for one, generation in zip(kernels, generations, strict=True)
        if one.attention
    ]
    factors = {name: [getattr(one, name) for one in kernels] for name in ("products", "others", "passes")}
    for name, values in {**factors, "attention": shares}.items():
        unit = b200.peak("bf16") if name == "attention" else 1.0
        low, middle, high = (end / unit for end in getattr(found, name).ends)
        assert middle == pytest.approx(median(values), rel=0.01)
        assert low == pytest.approx(min(values) ** 2 / middle, rel=0.03)
        assert high == pytest.approx(
            min(max(values) ** 2 / middle, 1.0 if name == "attention" else 9.0), rel=0.03
        )


def test_a_rounded_published_rate_is_a_separate_unknown() -> None:
    (rounded,) = (p for p in calibration_points() if p.claim == "meg1-baseline-39tf")
    key = rounded.rate.key
    assert key in {one.key for one in uncertain_numbers(load_system_file("dgx2h"), rounded)}
    low, high = kernels_at(rounded, key, HIGH, LOW)
    # The rate does not change passes over parameters, seven percent of the step.
    assert 39.5 / 38.5 < high.others / low.others < 1 + 1.1 * (39.5 / 38.5 - 1)
    number = Quantity(value=39e12, low=38.5e12, high=39.5e12, source=rounded.source)
    assert rounded.rate.best == number.value


def test_an_unknown_with_a_small_effect_has_no_curve() -> None:
    experiment, traces = traced("zero1")
    found = predict(experiment, load_system_file("dgx2"), traces, interval=True).interval
    assert found is not None
    for move in found.moves:
        assert (move.curve is not None) == (move.span > MIN_CURVE_SPAN * min(move.low_s, move.high_s))
    assert {move.curve is None for move in found.moves} == {True, False}


@pytest.mark.parametrize("name", ["zero1", "tp"])
def test_a_curve_gives_the_step_time_of_any_value(name: str) -> None:
    """A point of the curve is the step time of a system with this value, inside or outside the range."""
    experiment, traces = traced(name)
    system = load_system_file("dgx2")
    plain = predict(experiment, system, traces, interval=True)
    found = plain.interval
    assert found is not None
    curves = {move.key: move for move in found.moves if move.curve}
    assert "device.time.pace" in curves
    for move in curves.values():
        values = [value for value, _ in move.curve or ()]
        assert values == sorted(set(values))
        assert {move.low, move.best, move.high} <= set(values)
        assert move.seconds_at(move.low) == pytest.approx(move.low_s, rel=1e-6)
        assert move.seconds_at(move.high) == pytest.approx(move.high_s, rel=1e-6)
    if name == "zero1":  # long collectives between nodes
        rings = curves["links.inter-node.rings"]
        assert {1, 2, 3, 4, 5, 6, 7, 8} <= {value for value, _ in rings.curve or ()}
    pace = curves["device.time.pace"]
    assert min(pace.curve or [[0]])[0] == pytest.approx(0.92 / 4)
    for value in (0.7, 1.0, 1.3):
        (other,) = [with_values(system, {"device.time.pace": value})]
        alone = predict(experiment, other, traces).step_s
        assert pace.seconds_at(value) == pytest.approx(alone, rel=1.5e-2), value


def validated(system: System) -> System:
    """Return `system` after the checks of a system file."""
    device = replace(system.device, time=replace(system.device.time))
    return replace(system, device=device, links={name: replace(link) for name, link in system.links.items()})


def test_searched_values_are_valid_numbers_of_a_system() -> None:
    for name in ("dgx2", "selene", "lowbw-v100"):
        system = load_system_file(name)
        for one in unknowns(system):
            values = list(one.around)
            assert values == sorted(values)
            for value in (values[0], values[-1]):
                validated(with_values(system, {one.key: value}))
            assert values[0] <= one.low
            assert values[-1] >= one.high
            assert one.values_at(list(one.around.values())).tolist() == values


def test_seconds_are_rounded_to_seven_digits() -> None:
    assert [round_seconds(2 / 3), round_seconds(2e9 / 3)] == [0.6666667, 666666700.0]


def test_overlap_cost_slows_the_step_in_every_case() -> None:
    """Data-parallel messages overlap with the backward pass. Without overlap, the cost has no effect."""
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    cost = "links.inter-node.overlap_cost"
    zero, best, high = (with_values(system, {cost: value}) for value in (0.0, 0.025, 0.2))
    steps = [schedule_traces(experiment, one, traces, MODELLED_KERNELS).step_s for one in (zero, best, high)]
    assert steps[0] < steps[1] < steps[2]
    several = with_values(system, {cost: np.array([0.0, 0.025, 0.2])})
    together = schedule_traces(experiment, several, traces, MODELLED_KERNELS).seconds
    assert np.ravel(together).tolist() == pytest.approx(steps, rel=1e-12)
    plain = replace(experiment, layout=replace(experiment.layout, overlap=False))
    alone = trace_roles(plain)
    assert len({schedule_traces(plain, one, alone, MODELLED_KERNELS).step_s for one in (zero, high)}) == 1
