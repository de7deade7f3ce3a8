"""Intervals of a step's seconds: they hold the best value, grow with the ranges and vanish without them."""

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
    """`system` with its best values, and no ranges."""
    return with_values(system, {one.key: one.best for one in unknowns(system)})


def ranged(system: System, key: str, low: float, high: float) -> System:
    """`exact(system)`, in which one key of `device.time` has a range."""
    known = exact(system)
    number = replace(getattr(known.device.time, key), low=low, high=high, source="low: x; high: x")
    return replace(known, device=replace(known.device, time=replace(known.device.time, **{key: number})))


def kernels_of(kernels: Kernels, case: int) -> Kernels:
    """Kernels of one case."""
    return Kernels(*(np.ravel(one)[case if np.ndim(one) else 0].item() for one in kernels))


def assert_cases_are_alone(
    experiment: Experiment, system: System, traces: list[Trace], cases: list[int]
) -> None:
    """One pass times a step in every case as the step of a system without arrays."""
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
def test_one_pass_times_every_case_as_a_system_without_arrays(name: str) -> None:
    experiment, traces = traced(name)
    for system in (
        "dgx2",
        "selene",
        "gb200-nvl72",
        "mi300x",
        "vtrain-a100",
    ):  # counts of all kinds are unknown
        assert_cases_are_alone(experiment, load_system_file(system), traces, [0, 40, 111, -1, -17, -33])


def test_the_delay_of_the_last_rank_does_not_change_the_seconds_of_a_collective() -> None:
    """The arrays of repeated collectives come from a cache."""
    experiment, traces = traced("tp")
    system = with_values(load_system_file("dgx2"), {"device.time.jitter_s": 1e-6})
    assert_cases_are_alone(experiment, system, traces, [0, 40, -1])


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_times_published_experiments_in_every_case(seed: int) -> None:
    random = Random(seed)
    suites = ("megatron_2019", "zero_throughput", "v100_clusters", "a100_clusters", "one_node", "today")
    suite = load_suite(SUITES / f"{random.choice(suites)}.toml")
    experiment = random.choice(
        [entry.experiment for entry in suite.entries if entry.experiment.layout.pp < 8]
    )
    experiment = replace(experiment, model=replace(experiment.model, layers=experiment.layout.pp * 2))
    traces = trace_roles(experiment)
    cases = [random.randrange(200) for _ in range(8)]
    assert_cases_are_alone(experiment, load_system_file(experiment.system), traces, cases)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_interval_holds_the_best_value_and_lies_in_what_is_allowed(name: str) -> None:
    experiment, traces = traced(name)
    found = predict(experiment, load_system_file("dgx2"), traces, interval=True)
    assert found.interval is not None
    low, high = likely_range(found.interval.draws, found.step_s)
    least, most = possible_range(found.interval.cases(), found.step_s)
    assert least <= low <= found.step_s <= high <= most
    assert low < high
    spans = [move.span for move in found.interval.moves]
    assert spans == sorted(spans, reverse=True)
    assert all(span > 0 for span in spans), "what moves nothing is not listed"


def test_with_exact_numbers_there_is_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_known_of_a_device_is_known_where_its_kernels_were_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number in doubt leaves the interval, though others are in doubt where the kernels were measured."""
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
def test_who_knows_a_number_has_no_wider_interval(key: str) -> None:
    """Of a whole system, calibrated by a published point on another with the same devices."""
    experiment, traces = traced("tp")
    system = load_system_file("dgx2")
    known = with_values(system, {f"device.time.{key}": getattr(system.timing, key)})
    step = predict(experiment, system, traces, interval=True)
    exact_ = predict(experiment, known, traces, interval=True)
    assert step.interval is not None
    assert exact_.interval is not None
    (low, high), (least, most) = (
        likely_range(exact_.interval.draws, step.step_s),
        likely_range(step.interval.draws, step.step_s),
    )
    assert high - low <= (most - least) * 1.02


def test_nobody_pays_for_an_interval_who_does_not_ask() -> None:
    experiment = Experiment(name="e", model=replace(MODEL, layers=2), layout=LAYOUTS["zero1"], system="dgx2")
    found = simulate(experiment, load_system_file("dgx2"), time=True).time
    assert found is not None
    assert found.interval is None
    assert not found.timeline.spans


def by_itself(experiment: Experiment, system: System, traces: list[Trace]) -> StepInterval:
    """The interval of kernels as the model has them: no published point takes back what the device is taken for."""
    found = unknowns(system)
    in_cases = drawn(system, quantiles_in_cases(found))
    return interval_of_seconds(found, schedule_traces(experiment, in_cases, traces, MODELLED_KERNELS).seconds)


@settings(max_examples=12)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(0, 0.4), st.floats(0, 0.2), st.floats(0.3, 0.9))
def test_a_wider_range_makes_no_interval_narrower(name: str, down: float, up: float, part: float) -> None:
    experiment, traces = traced(name)
    system = load_system_file("dgx2")
    best = system.timing.matmul_efficiency
    wide = ranged(system, "matmul_efficiency", best * (1 - down), min(1, best * (1 + up)))
    narrow = ranged(system, "matmul_efficiency", best * (1 - part * down), min(1, best * (1 + part * up)))
    step = schedule_traces(experiment, system, traces, MODELLED_KERNELS).step_s
    outer, inner = (by_itself(experiment, one, traces) for one in (wide, narrow))
    slack = 1e-6 * step
    likely = [likely_range(one.draws, step) for one in (inner, outer)]
    possible = [possible_range(one.cases(), step) for one in (inner, outer)]
    for (low, high), (least, most) in (likely, possible):
        assert least <= low + slack
        assert high <= most + slack


def alike(found: Kernels) -> Kernels:
    """With products that take as long as the others, and what was measured by itself as it was."""
    return found._replace(products=found.others)


def kernels_at(generation: Generation, key: str, *quantiles: float) -> list[Kernels]:
    """The calibrated kernels with one unknown at each of `quantiles`."""
    found = calibrated_kernels_at(generation, {key: np.array(quantiles)})
    return [kernels_of(found, case) for case in range(len(quantiles))]


def test_a_published_point_takes_back_what_is_doubted_of_its_own_device() -> None:
    """The run that a generation comes from takes as long as published, whatever its products are taken for."""
    for point in calibration_points():
        if "V100" not in point.name:
            continue
        key = "device.time.matmul_efficiency"
        slow, best = kernels_at(point, key, LOW, BEST)
        assert slow < best, "slower products leave less for the software"
        assert best == alike(calibrated_kernels(point))


@pytest.mark.parametrize("quantile", [LOW, 0.2, 0.4, BEST, 1.25, 2.0])
def test_whatever_kernels_are_slow_the_published_point_is_as_published(quantile: float) -> None:
    """One rate does not say which: with products as fast as alone, the others have all that is left of it.

    Beyond the range, where values are searched for, products are slower than the others.
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
        if best.others < 1:  # they beat the model, and do so alike
            assert found == best
            continue
        assert (found.products < best.products and found.others > best.others) == (quantile < BEST)
        assert min(found.products, found.others) >= 1
        assert (found.products <= found.others) == (quantile <= HIGH)


def test_kernels_that_beat_the_model_do_so_alike() -> None:
    point = replace(calibration_points()[0], flops_per_device=90e12, low=None, high=None)
    slow, best = kernels_at(point, f"{point.name}: products", LOW, BEST)
    assert slow == best == alike(best)
    assert best.others < 1


def test_what_the_point_does_not_fix_stays_in_doubt() -> None:
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    found = predict(experiment, system, traces, interval=True)
    assert found.interval is not None
    keys = {move.key: move.span / found.step_s for move in found.interval.moves}
    assert keys["links.inter-node.rings"] > 0.2, "small products over a slow network: messages decide"
    assert found.generation is not None
    slow, best = kernels_at(found.generation, "device.time.matmul_efficiency", LOW, BEST)
    assert slow.others < best.others


def test_devices_differ_from_the_one_that_was_measured_and_kernels_without_a_point_from_the_best() -> None:
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    calibrated = predict(experiment, system, traces, interval=True)
    assert calibrated.interval is not None
    (pace,) = (move for move in calibrated.interval.moves if move.key == "device.time.pace")
    assert pace.low_s < pace.high_s, "the point takes back nothing of it"
    fused = replace(experiment, layout=replace(experiment.layout, kernels="fused"))
    found = predict(fused, system, traces, interval=True)
    assert found.interval is not None
    (products,) = (move for move in found.interval.moves if move.key == "kernels of other devices: products")
    assert products.low_s < found.step_s < products.high_s


def test_kernels_of_an_uncalibrated_device_have_twice_the_range_of_all_generations() -> None:
    """Around the median, on a logarithmic scale; attention is a share of the device's peak, and at most the peak."""
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
    seen = {name: [getattr(one, name) for one in kernels] for name in ("products", "others", "passes")}
    for name, values in {**seen, "attention": shares}.items():
        unit = b200.peak("bf16") if name == "attention" else 1.0
        low, middle, high = (end / unit for end in getattr(found, name).ends)
        assert middle == pytest.approx(median(values), rel=0.01)
        assert low == pytest.approx(min(values) ** 2 / middle, rel=0.03)
        assert high == pytest.approx(
            min(max(values) ** 2 / middle, 1.0 if name == "attention" else 9.0), rel=0.03
        )


def test_a_rounded_published_point_is_an_unknown_of_its_own() -> None:
    (rounded,) = (p for p in calibration_points() if p.claim == "meg1-baseline-39tf")
    key = rounded.rate.key
    assert key in {one.key for one in uncertain_numbers(load_system_file("dgx2h"), rounded)}
    least, most = kernels_at(rounded, key, HIGH, LOW)
    # Passes over parameters it does not move, seven percent of that step.
    assert 39.5 / 38.5 < most.others / least.others < 1 + 1.1 * (39.5 / 38.5 - 1)
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
def test_a_curve_goes_through_the_range_and_says_what_a_step_takes_with_any_value(name: str) -> None:
    """At each point of it what a step on that system takes; in a range's middle and beyond it as well."""
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
    if name == "zero1":  # which meets over nodes for long enough
        rings = curves["links.inter-node.rings"]
        assert {1, 2, 3, 4, 5, 6, 7, 8} <= {value for value, _ in rings.curve or ()}
    pace = curves["device.time.pace"]
    assert min(pace.curve or [[0]])[0] == pytest.approx(0.92 / 4)
    for value in (0.7, 1.0, 1.3):
        (other,) = [with_values(system, {"device.time.pace": value})]
        alone = predict(experiment, other, traces).step_s
        assert pace.seconds_at(value) == pytest.approx(alone, rel=1.5e-2), value


def checked(system: System) -> System:
    """`system`, whose numbers are checked like those of a file."""
    device = replace(system.device, time=replace(system.device.time))
    return replace(system, device=device, links={name: replace(link) for name, link in system.links.items()})


def test_what_is_searched_stays_a_number_that_a_system_can_have() -> None:
    for name in ("dgx2", "selene", "lowbw-v100"):
        system = load_system_file(name)
        for one in unknowns(system):
            values = list(one.around)
            assert values == sorted(values)
            for value in (values[0], values[-1]):
                checked(with_values(system, {one.key: value}))
            assert values[0] <= one.low
            assert values[-1] >= one.high
            assert one.values_at(list(one.around.values())).tolist() == values


def test_seconds_are_kept_to_seven_digits() -> None:
    assert [round_seconds(2 / 3), round_seconds(2e9 / 3)] == [0.6666667, 666666700.0]


def test_what_is_hidden_takes_multiprocessors_from_compute_in_every_case() -> None:
    """Messages of data parallelism beside backward; without any beside it a step takes what it took."""
    experiment, traces = traced("zero1")
    system = load_system_file("dgx2")
    cost = "links.inter-node.overlap_cost"
    free, best, dear = (with_values(system, {cost: value}) for value in (0.0, 0.025, 0.2))
    steps = [schedule_traces(experiment, one, traces, MODELLED_KERNELS).step_s for one in (free, best, dear)]
    assert steps[0] < steps[1] < steps[2]
    several = with_values(system, {cost: np.array([0.0, 0.025, 0.2])})
    together = schedule_traces(experiment, several, traces, MODELLED_KERNELS).seconds
    assert np.ravel(together).tolist() == pytest.approx(steps, rel=1e-12)
    plain = replace(experiment, layout=replace(experiment.layout, overlap=False))
    alone = trace_roles(plain)
    assert len({schedule_traces(plain, one, alone, MODELLED_KERNELS).step_s for one in (free, dear)}) == 1
