"""Tests of the seconds of one operator: lower bounds, effects of shapes and power, calibration, and its basis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, Experiment, Layout, OperatorSet, models, systems
from repro.config.quantity import UNSAID
from repro.config.system import System
from repro.config.systems.unknowns import with_values
from repro.config.timing import UNALIGNED_MATMUL, OperatorRate, Provenance
from repro.results.schema import ExperimentRecord
from repro.simulate.record import failed_record, simulation_facts
from repro.simulate.time import calibration
from repro.simulate.time.calibration import (
    CALIBRATED,
    KERNEL_TIMES,
    PUBLISHED_POINT,
    UNCALIBRATED,
    basis_of_record,
    count_bases,
    prediction_basis,
    weakest_basis,
)
from repro.simulate.time.device import MODELLED_KERNELS, DeviceCost, Kernels, product_sizes
from repro.simulate.time.predict import predict
from repro.simulate.trace.events import Operator
from tests.records import changed

V100 = systems.load_system_file("dgx2")
PEAK = 125e12


def product(m: int, n: int, k: int, batch: int = 0, name: str = "aten.mm") -> Operator:
    many, name = (batch, "aten.bmm") if batch else (1, name)
    shapes = tuple((batch, *shape) if batch else shape for shape in ((m, k), (k, n)))
    return Operator(name, 2 * many * m * n * k, 2 * many * (m * k + k * n), 2 * many * m * n, shapes, 2)


sizes = st.integers(1, 512).map(lambda n: 8 * n)


@given(m=sizes, n=sizes, k=sizes, batch=st.sampled_from([0, 4, 32]), factor=st.integers(2, 4))
def test_products_do_not_exceed_peak_rates_or_get_faster_with_size(
    m: int, n: int, k: int, batch: int, factor: int
) -> None:
    operator, cost = product(m, n, k, batch), DeviceCost(V100, "fp16")
    seconds = cost.seconds(operator)
    assert seconds >= operator.flops / (PEAK * V100.timing.matmul_efficiency) * (1 - 1e-12)
    assert seconds >= (operator.read + operator.written) / 900e9
    assert seconds >= V100.timing.kernel_s
    for larger in ((factor * m, n, k), (m, factor * n, k), (m, n, factor * k)):
        assert cost.seconds(product(*larger, batch)) >= seconds * (1 - 1e-12)


def test_product_rates_depend_on_tiles_waves_and_alignment() -> None:
    """Rates fall with few tiles, a partly empty wave, a short K, and sizes that tensor cores do not support."""
    cost = DeviceCost(V100, "fp16")

    def rate(operator: Operator) -> float:
        return operator.flops / cost.seconds(operator)

    full = rate(product(8192, 4096, 4096))
    assert rate(product(128, 128, 1024)) < full / 2
    assert rate(product(8192, 4096, 32)) < full / 2
    assert rate(product(4096, 238, 3808)) < rate(product(4096, 240, 3808)) / 2
    # 80 multiprocessors: 5 x 16 tiles of 256 x 128 are one wave, one more row of tiles needs a second wave.
    assert rate(product(256 * 5, 128 * 16, 4096)) > 1.2 * rate(product(256 * 6, 128 * 16, 4096))


def test_products_without_tensor_cores_have_the_measured_rate() -> None:
    """Before cuBLAS 11, sizes that are no multiples of 8 do not use tensor cores, with any generation of software."""
    operator = product(4096, 4090, 4096)
    seconds = DeviceCost(V100, "fp16").seconds(operator)
    assert operator.flops / seconds == pytest.approx(V100.timing.unaligned_flops, rel=0.1)
    assert DeviceCost(V100, "fp16", kernels=Kernels(1.5, 1.5)).seconds(operator) == seconds
    a100 = DeviceCost(systems.load_system_file("selene"), "fp16")  # cuBLAS 11 uses tensor cores for any size
    assert a100.seconds(operator) < 1.1 * a100.seconds(product(4096, 4096, 4096))


def test_product_sizes_ignore_the_added_operand() -> None:
    added = Operator("aten.addmm", 1, 1, 1, ((32,), (16, 8), (8, 32)), 2)
    assert product_sizes(added) == (1, 16, 32, 8)
    batched = Operator("aten.baddbmm", 1, 1, 1, ((4, 16, 32), (4, 16, 8), (4, 8, 32)), 2)
    assert product_sizes(batched) == (4, 16, 32, 8)


@pytest.mark.parametrize(
    ("system", "total", "seconds"),
    [
        ("selene", 24_470_157 * 16, 391_522_512 / 1713e9),
        ("selene", 6_613_527 * 16, 105_816_432 / 1616e9),
        ("dgx2", 3902**2 * 16, 3902**2 * 16 / 805e9),
        ("dgx2", 1870**2 * 16, 1870**2 * 16 / 770e9),
    ],
)
def test_kernels_in_a_sequence_take_the_measured_time(system: str, total: int, seconds: float) -> None:
    """Bytes and bytes/s of te42kyfo/gpu-benches gpu-small-kernels, for sizes above the cache."""
    operator = Operator("aten.mul", 0, total // 2, total // 2, (), 2)
    cost = DeviceCost(systems.load_system_file(system), "fp16")
    assert cost.seconds(operator) == pytest.approx(seconds, rel=0.01)


def measured(**rates: OperatorRate) -> System:
    """Return a V100 system with measured operators instead of the model."""
    provenance = Provenance(date="2026-01-01", torch="2", ranks=1, repeats=1)
    return replace(V100, device=replace(V100.device, operators=rates), provenance=provenance)


def test_calibrated_rates_replace_the_model() -> None:
    rates = {
        "matmul": OperatorRate(fixed_s=1e-6, per_flop_s=1e-12),
        "elementwise": OperatorRate(fixed_s=2e-6, per_byte_s=1e-9),
        "repro.adamw_": OperatorRate(fixed_s=3e-6),
    }
    system, add = measured(**rates), Operator("aten.add", 0, 100, 100, (), 4)
    assert prediction_basis(OperatorSet.SOFTMAX, system) == CALIBRATED
    assert prediction_basis(OperatorSet.SOFTMAX, V100) == PUBLISHED_POINT
    cost = DeviceCost(system, "fp32")
    assert cost.seconds(product(8, 8, 8)) == pytest.approx(1e-6 + 1024e-12)
    assert cost.seconds(add) == pytest.approx(2e-6 + 200e-9)
    assert cost.seconds(add._replace(calls=5)) == pytest.approx(5 * 2e-6 + 200e-9)
    assert cost.seconds(Operator("repro.adamw_", 5, 100, 100, (), 4)) == pytest.approx(3e-6)


@pytest.mark.parametrize("sizes", [(8192, 50257, 1600), (50257, 1600, 8192), (8192, 1600, 50257)])
def test_calibrated_products_with_unaligned_rows_have_a_separate_rate(sizes: tuple[int, int, int]) -> None:
    """Products in fp32 have the rate of aligned sizes. A file may have one rate."""
    odd, even = product(*sizes), product(*(50304 if size == 50257 else size for size in sizes))
    plain = OperatorRate(fixed_s=1e-6, per_flop_s=1e-15)
    rates = {"matmul": plain, "elementwise": OperatorRate(fixed_s=2e-6)}
    slow = {UNALIGNED_MATMUL: OperatorRate(fixed_s=2e-6, per_flop_s=8e-15)}
    cost, without = (DeviceCost(measured(**known), "fp16") for known in (rates | slow, rates))
    assert cost.seconds(odd) == pytest.approx(2e-6 + odd.flops * 8e-15)
    assert without.seconds(odd) == pytest.approx(1e-6 + odd.flops * 1e-15)
    for aligned in (even, odd._replace(itemsize=4)):
        assert cost.seconds(aligned) == pytest.approx(1e-6 + aligned.flops * 1e-15)


def test_an_unknown_peak_rate_is_an_error() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        DeviceCost(V100, "bf16")


@pytest.mark.parametrize(
    "generation", calibration.calibration_points(), ids=lambda generation: generation.name
)
def test_calibrated_kernels_reproduce_the_published_rate(generation: calibration.CalibrationPoint) -> None:
    """The model with all layers has the published rate, though its factor is derived from two shallow models."""
    experiment = generation.experiment(models.load_model(generation.model))
    found = predict(experiment, systems.load_system_file(generation.system))
    assert found.generation is generation
    assert found.flops_per_device == pytest.approx(generation.flops_per_device, rel=5e-3)
    assert 0.5 < found.kernels.others < 2
    waits = found.as_dict()["exposed_s"]  # the factor changes kernels and no messages
    # The step on B200 waits for the reduction after its last backward pass, as all rows of its source do.
    assert waits < (11e-3 if generation.layout.pp > 1 else 5e-3) * found.step_s


@pytest.mark.parametrize(
    ("kernels", "names", "point"),
    [
        # V100s of 300 W have less power than those of a DGX-2. Only they have a point of their card.
        ("softmax", "jean-zay dgx1-v100-16gb", "Megatron-LM of March 2021 on V100 SXM2"),
        ("softmax", "dgx2 dgx2h lowbw-v100", "Megatron-LM of December 2020 on V100"),
        ("unfused", "jean-zay dgx1-v100-16gb dgx2 dgx2h lowbw-v100", "Megatron-LM of September 2019 on V100"),
        # Unfused kernels on an A100 have the point of softmax kernels, so both differ by their operators alone.
        ("softmax", "selene", "Megatron-LM of December 2020 on A100"),
        ("unfused", "selene", "Megatron-LM of December 2020 on A100"),
        # A100s of 40 and of 80 GB have equal processors, and their system files describe the memory.
        ("fused", "selene dgx-a100-40gb", "llm-foundry of 2023 on A100"),
        # Published runs on H100 have the software of 2023 and 2024. No such run on H200 is published.
        ("fused", "dgx-h100", "llm-foundry of 2023 on H100"),
        ("fused", "dgx-h200", "software of 2026 on Hopper, fused kernels"),
        ("fused-2024", "dgx-h100 dgx-h200", "fms-fsdp of 2024 on H100"),
        ("fused-2026", "dgx-h100 dgx-h200", "software of 2026 on Hopper, fused kernels"),
        ("reference", "dgx-h100 dgx-h200", "software of 2026 on Hopper, torch's operators"),
        ("fused", "dgx2", "kernels of other devices"),
        ("reference", "selene", "kernels of other devices"),
        ("softmax", "dgx-h100", "kernels of other devices"),
    ],
)
def test_kernels_and_device_select_the_calibration_point(kernels: str, names: str, point: str) -> None:
    for name in names.split():
        assert calibration.calibration_point_of(kernels, systems.load_system_file(name)).name == point, name


@pytest.mark.parametrize(
    ("operator", "factor"),
    [
        (product(4096, 4096, 4096), "products"),
        (Operator("aten.add", 0, 10**9, 10**9, (), 2), "others"),
        (Operator("aten.add_", 0, 2 * 10**9, 10**9, (), 2), "passes"),
    ],
)
def test_products_other_kernels_and_parameter_passes_have_separate_factors(
    operator: Operator, factor: str
) -> None:
    plain_s = DeviceCost(V100, "fp16").seconds(operator)
    for kernels in (Kernels(products=1.5, others=3.0, passes=1.2), Kernels(0.9, 0.9)):
        cost = DeviceCost(V100, "fp16", kernels)
        assert cost.seconds(operator) == pytest.approx(getattr(kernels, factor) * plain_s, rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "milliseconds"),
    [
        (1_210_807_296, 23.20 + 11.08 + 19.52 + 47.65 + 11.33),
        (1_013_084_160, 20.02 + 8.94 + 15.90 + 39.38 + 9.01),
    ],
)
def test_parameter_passes_on_v100_take_the_logged_time(parameters: int, milliseconds: float) -> None:
    """Timers of gradient copies for the reduction, copies to fp32, clipping, Adam and parameter copies: medians of the
    last stages in bigscience-workshop/bigscience experiments/gpt2-meg, 4 to 64 nodes."""
    passes = calibration.calibration_point_of("softmax", V100).passes.value
    cost = DeviceCost(V100, "fp16", MODELLED_KERNELS._replace(passes=passes))
    moved = {"aten.copy_": 12 + 6 + 6, "repro.norm_squared": 4, "aten._foreach_mul_": 8, "repro.adamw_": 28}
    seconds = sum(
        cost.seconds(Operator(name, 0, each * parameters, 0, (), 2)) for name, each in moved.items()
    )
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.02)


# --- power that limits the total rate of the multiprocessors

A100 = systems.load_system_file("selene")


def unthrottled(efficiency: float) -> DeviceCost:
    return DeviceCost(with_values(A100, {"device.time.unthrottled_efficiency": efficiency}), "fp16")


def throttled() -> DeviceCost:
    """Return costs of a device without a known unthrottled efficiency."""
    time = replace(A100.device.time, unthrottled_efficiency=UNSAID)
    return DeviceCost(replace(A100, device=replace(A100.device, time=time)), "fp16")


def test_cublas_products_on_an_a100_have_the_measured_rate() -> None:
    """TFLOP/s of square products with random numbers in half precision: triton-lang/triton#3551."""
    measured = [221.1, 246.3, 219.5, 244.5, 213.1, 230.8, 247.9, 229.2, 244.3]
    operators = [product(size, size, size) for size in range(2176, 3201, 128)]
    rates = [operator.flops / DeviceCost(A100, "fp16").seconds(operator) / 1e12 for operator in operators]
    assert rates == pytest.approx(measured, rel=0.04)


@given(m=sizes, n=sizes, k=sizes, efficiency=st.floats(0.5, 1.0))
def test_idle_multiprocessors_raise_the_rate_within_bounds(m: int, n: int, k: int, efficiency: float) -> None:
    """An unthrottled efficiency below that of large products has no effect."""
    operator = product(m, n, k)
    reached, plain_s = A100.timing.matmul_efficiency, throttled().seconds(operator)
    raised_s = unthrottled(efficiency).seconds(operator)
    assert operator.flops / (312e12 * reached) <= raised_s * (1 + 1e-12)
    assert min(1, reached / efficiency) * plain_s * (1 - 1e-12) <= raised_s <= plain_s * (1 + 1e-12)


def test_idle_multiprocessors_cost_less_than_their_share() -> None:
    """GPT-3's product on one of eight ranks fills 3.56 of 4 waves, that of the 530B model 5.93 of 6."""
    partly, full = product(2048, 6144, 12288), product(2048, 10240, 20480)

    def slowdown(cost: DeviceCost) -> float:
        return cost.seconds(partly) / partly.flops / (cost.seconds(full) / full.flops) - 1

    assert slowdown(throttled()) == pytest.approx(0.11, abs=0.01)
    assert 0.05 < slowdown(DeviceCost(A100, "fp16")) < 0.07
    assert slowdown(unthrottled(0.945)) < 0.015


# --- basis of predictions


def record(system: str, **changes: object) -> ExperimentRecord:
    """Return a record of a simulated step of 1 s, of a tiny model with fused kernels."""
    model, layout = models.load_model("tiny-stages"), Layout(precision="fp16")
    experiment = Experiment(name="x", model=model, layout=layout, system=system)
    failed = failed_record(experiment, "", suite="s", wall_s=0.1)
    return changed(failed, **{"outcome": "ok", "metrics": {"step_seconds.median": 1.0}, **changes})


def test_the_system_decides_the_basis_of_a_record() -> None:
    for names, basis in {
        ("dgx-h100", "yuan"): PUBLISHED_POINT,
        ("dgx-h200",): KERNEL_TIMES,
        ("dgx2", "dgx-b200", "gb200-nvl72", "mi300x"): UNCALIBRATED,
        ("missing.toml",): "",
    }.items():
        assert {basis_of_record(record(system)) for system in names} == {basis}


def test_a_record_without_predicted_time_has_no_basis() -> None:
    for changes in ({"outcome": "oom"}, {"metrics": {}}, {"evidence": "measured"}):
        assert basis_of_record(record("dgx-h100", **changes)) == "", changes


def test_simulation_facts_on_h200_depend_on_kernel_times() -> None:
    system = systems.load_system_file("dgx-h200")
    facts = {kernels: simulation_facts(system, kernels) for kernels in OperatorSet}
    assert facts[OperatorSet.FUSED] == facts[OperatorSet.FUSED_2026]
    others = (OperatorSet.FUSED_2024, OperatorSet.REFERENCE)
    assert len({facts[kernels].numbers for kernels in (OperatorSet.FUSED, *others)}) == 3


def test_several_records_have_the_weakest_basis_and_are_counted() -> None:
    assert weakest_basis([CALIBRATED, UNCALIBRATED, PUBLISHED_POINT]) == UNCALIBRATED
    assert weakest_basis([CALIBRATED, KERNEL_TIMES, PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([CALIBRATED, "", PUBLISHED_POINT]) == PUBLISHED_POINT
    assert weakest_basis([]) == weakest_basis([""]) == ""
    counted = count_bases([UNCALIBRATED, PUBLISHED_POINT, "", PUBLISHED_POINT])
    assert counted == "Times rest on: published point (2), uncalibrated (1)."
    assert count_bases([""]) == ""
