"""Tests of the seconds of one operator: lower bounds, effects of shapes, and calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import ConfigError, OperatorSet, models, systems
from repro.config.timing import UNALIGNED_MATMUL, OperatorRate, Provenance
from repro.simulate.time import calibration
from repro.simulate.time.calibration import CALIBRATED, PUBLISHED_POINT, prediction_basis
from repro.simulate.time.device import MODELLED_KERNELS, DeviceCost, Kernels, product_sizes
from repro.simulate.trace.events import Operator

V100 = systems.load_system_file("dgx2")
PEAK = 125e12


def product(m: int, n: int, k: int, batch: int = 0, name: str = "aten.mm") -> Operator:
    left, right = (m, k), (k, n)
    if batch:
        left, right, name = (batch, m, k), (batch, k, n), "aten.bmm"  # type: ignore[assignment]
    many = max(batch, 1)
    return Operator(
        name, 2 * many * m * n * k, 2 * many * (m * k + k * n), 2 * many * m * n, (left, right), 2
    )


sizes = st.integers(1, 512).map(lambda n: 8 * n)


@given(m=sizes, n=sizes, k=sizes, batch=st.sampled_from([0, 4, 32]))
def test_no_product_exceeds_peak_arithmetic_or_bandwidth(m: int, n: int, k: int, batch: int) -> None:
    operator = product(m, n, k, batch)
    seconds = DeviceCost(V100, "fp16").seconds(operator)
    assert seconds >= operator.flops / (PEAK * V100.timing.matmul_efficiency) * (1 - 1e-12)
    assert seconds >= (operator.read + operator.written) / 900e9
    assert seconds >= V100.timing.kernel_s


@given(m=sizes, n=sizes, k=sizes, factor=st.integers(2, 4))
def test_a_larger_product_is_not_faster(m: int, n: int, k: int, factor: int) -> None:
    cost = DeviceCost(V100, "fp16")
    small = cost.seconds(product(m, n, k))
    for larger in (product(factor * m, n, k), product(m, factor * n, k), product(m, n, factor * k)):
        assert cost.seconds(larger) >= small * (1 - 1e-12)


def test_large_products_reach_the_devices_efficiency() -> None:
    operator = product(8192, 8192, 8192)
    rate = operator.flops / DeviceCost(V100, "fp16").seconds(operator)
    assert 0.95 < rate / (PEAK * V100.timing.matmul_efficiency) <= 1


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
    known = V100.timing.unaligned_flops
    assert known is not None
    assert operator.flops / seconds == pytest.approx(known, rel=0.1)
    assert DeviceCost(V100, "fp16", kernels=Kernels(1.5, 1.5)).seconds(operator) == seconds
    a100 = DeviceCost(systems.load_system_file("selene"), "fp16")  # cuBLAS 11 uses tensor cores for any size
    assert a100.seconds(operator) < 1.1 * a100.seconds(product(4096, 4096, 4096))


def test_product_sizes_ignore_the_added_operand() -> None:
    added = Operator("aten.addmm", 1, 1, 1, ((32,), (16, 8), (8, 32)), 2)
    assert product_sizes(added) == (1, 16, 32, 8)
    batched = Operator("aten.baddbmm", 1, 1, 1, ((4, 16, 32), (4, 16, 8), (4, 8, 32)), 2)
    assert product_sizes(batched) == (4, 16, 32, 8)


def test_memory_bound_operators_reach_the_memory_efficiency() -> None:
    cost = DeviceCost(V100, "fp16")
    operator = Operator("aten.add", 0, 10**9, 10**9, (), 2)
    transfer_s = 2e9 / (900e9 * V100.timing.memory_efficiency)
    overhead_s = V100.timing.kernel_s + V100.timing.fill_s
    assert cost.seconds(operator) == pytest.approx(transfer_s + overhead_s, rel=1e-12)
    rows = Operator("aten.embedding", 0, 10**9, 10**6, (), 2)  # reads the returned rows, not the table
    assert cost.seconds(rows) < cost.seconds(operator) / 100


def test_each_call_of_an_operator_takes_one_kernel() -> None:
    cost = DeviceCost(V100, "fp16")
    one = Operator("aten.copy_", 0, 1000, 1000, (), 2)
    assert cost.seconds(one._replace(read=64_000, written=64_000, calls=64)) == 64 * cost.seconds(one)
    overhead_s = V100.timing.kernel_s + V100.timing.fill_s
    assert cost.seconds(one._replace(calls=4)) - cost.seconds(one) == pytest.approx(3 * overhead_s)


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
    assert DeviceCost(systems.load_system_file(system), "fp16").seconds(operator) == pytest.approx(
        seconds, rel=0.01
    )


def test_calibrated_rates_replace_the_model() -> None:
    rates = {
        "matmul": OperatorRate(fixed_s=1e-6, per_flop_s=1e-12),
        "elementwise": OperatorRate(fixed_s=2e-6, per_byte_s=1e-9),
        "repro.adamw_": OperatorRate(fixed_s=3e-6),
    }
    provenance = Provenance(date="2026-01-01", torch="2", ranks=1, repeats=1)
    system = replace(V100, device=replace(V100.device, operators=rates), provenance=provenance)
    assert prediction_basis(OperatorSet.SOFTMAX, system) == CALIBRATED
    assert prediction_basis(OperatorSet.SOFTMAX, V100) == PUBLISHED_POINT
    cost = DeviceCost(system, "fp32")
    assert cost.seconds(product(8, 8, 8)) == pytest.approx(1e-6 + 1024e-12)
    assert cost.seconds(Operator("aten.add", 0, 100, 100, (), 4)) == pytest.approx(2e-6 + 200e-9)
    several = Operator("aten.add", 0, 100, 100, (), 4, calls=5)
    assert cost.seconds(several) == pytest.approx(5 * 2e-6 + 200e-9)
    assert cost.seconds(Operator("repro.adamw_", 5, 100, 100, (), 4)) == pytest.approx(3e-6)


@pytest.mark.parametrize("sizes", [(8192, 50257, 1600), (50257, 1600, 8192), (8192, 1600, 50257)])
def test_calibrated_products_with_unaligned_rows_have_a_separate_rate(sizes: tuple[int, int, int]) -> None:
    """Products in fp32 have the rate of aligned sizes."""
    rates = {
        "matmul": OperatorRate(fixed_s=1e-6, per_flop_s=1e-15),
        UNALIGNED_MATMUL: OperatorRate(fixed_s=2e-6, per_flop_s=8e-15),
        "elementwise": OperatorRate(fixed_s=2e-6),
    }
    provenance = Provenance(date="2026-01-01", torch="2", ranks=1, repeats=1)
    cost, without = (
        DeviceCost(replace(V100, device=replace(V100.device, operators=known), provenance=provenance), "fp16")
        for known in (rates, {"matmul": rates["matmul"], "elementwise": rates["elementwise"]})
    )
    odd = product(*sizes)
    assert cost.seconds(odd) == pytest.approx(2e-6 + odd.flops * 8e-15)
    assert without.seconds(odd) == pytest.approx(1e-6 + odd.flops * 1e-15), "a file may have one rate"
    even = product(*(50304 if size == 50257 else size for size in sizes))
    assert cost.seconds(even) == pytest.approx(1e-6 + even.flops * 1e-15)
    wide = odd._replace(itemsize=4)
    assert cost.seconds(wide) == pytest.approx(1e-6 + odd.flops * 1e-15)


def test_an_unknown_peak_rate_is_an_error() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        DeviceCost(V100, "bf16")


@pytest.mark.parametrize(
    "generation", calibration.calibration_points(), ids=lambda generation: generation.name
)
def test_calibrated_kernels_reproduce_the_published_rate(generation: calibration.CalibrationPoint) -> None:
    """The model with all layers has the published rate, though its factor is derived from two shallow models."""
    from repro.simulate.time.predict import predict

    experiment = generation.experiment(models.load_model(generation.model))
    found = predict(experiment, systems.load_system_file(generation.system))
    assert found.generation is generation
    assert found.flops_per_device == pytest.approx(generation.flops_per_device, rel=5e-3)
    assert 0.5 < found.kernels.others < 2
    waits = found.as_dict()["exposed_s"]  # the factor changes kernels and no messages
    # The step on B200 waits for the reduction after its last backward pass, as all rows of its source do.
    assert waits < (11e-3 if generation.layout.pp > 1 else 5e-3) * found.step_s


def test_a_missing_calibration_point_falls_back_to_related_kernels() -> None:
    """Unfused kernels on an A100 have the point of softmax kernels, so both differ by their operators alone."""
    a100 = systems.load_system_file("selene")
    fused = calibration.calibration_point_of("softmax", a100)
    assert fused is not None
    assert (fused.layout.kernels, fused.compute_capability) == ("softmax", "8.0")
    assert calibration.calibration_point_of("unfused", a100) is fused
    for kernels in ("softmax", "unfused"):  # both have a point on a V100
        point = calibration.calibration_point_of(kernels, V100)
        assert point is not None
        assert point.layout.kernels == kernels
    recent = calibration.calibration_point_of("fused", a100)
    assert recent is not None
    assert recent.layout.kernels == "fused"
    for kernels, system in (
        ("fused", V100),
        ("reference", a100),
        ("softmax", systems.load_system_file("dgx-h100")),
    ):
        found = calibration.calibration_point_of(kernels, system)
        assert found is not None
        assert found.name == "kernels of other devices"


def test_a_card_specific_point_precedes_the_capability_point() -> None:
    """V100s of 300 W have less power than those of a DGX-2. Other cards have the point of their compute capability."""
    points = {
        (kernels, name): calibration.calibration_point_of(kernels, systems.load_system_file(name))
        for kernels in ("softmax", "unfused")
        for name in ("jean-zay", "dgx1-v100-16gb", "dgx2", "dgx2h", "lowbw-v100")
    }
    card_points = {key for key, point in points.items() if point is not None and point.card}
    assert card_points == {("softmax", "jean-zay"), ("softmax", "dgx1-v100-16gb")}
    assert len({id(point) for (kernels, _), point in points.items() if kernels == "unfused"}) == 1
    assert points["softmax", "dgx2"] is points["softmax", "lowbw-v100"]


def test_all_a100_systems_have_the_point_of_2023() -> None:
    """A100s of 40 and of 80 GB have equal processors, and their system files describe the memory."""
    points = [
        calibration.calibration_point_of("fused", systems.load_system_file(name))
        for name in ("dgx-a100-40gb", "selene")
    ]
    assert points[0] is not None
    assert points[0] is points[1]


def test_fused_kernels_on_h200_have_the_point_of_2026() -> None:
    """Published runs on H100 have the software of 2023 and 2024. No such run on H200 is published."""
    found = {
        (kernels, name): calibration.calibration_point_of(kernels, systems.load_system_file(name))
        for kernels in ("fused", "fused-2024", "fused-2026", "reference")
        for name in ("dgx-h100", "dgx-h200")
    }
    names = {key: point.name if point is not None else "" for key, point in found.items()}
    assert names["fused", "dgx-h100"] == "llm-foundry of 2023 on H100"
    for name in ("dgx-h100", "dgx-h200"):
        assert names["fused-2024", name] == "fms-fsdp of 2024 on H100"
        assert (
            names["fused-2026", name]
            == names["fused", "dgx-h200"]
            == "software of 2026 on Hopper, fused kernels"
        )
        assert names["reference", name] == "software of 2026 on Hopper, torch's operators"


def test_products_and_other_kernels_have_separate_factors() -> None:
    plain, calibrated = DeviceCost(V100, "fp16"), DeviceCost(V100, "fp16", Kernels(products=1.5, others=3.0))
    large, moved = product(4096, 4096, 4096), Operator("aten.add", 0, 10**9, 10**9, (), 2)
    assert calibrated.seconds(large) == pytest.approx(1.5 * plain.seconds(large))
    assert calibrated.seconds(moved) == pytest.approx(3.0 * plain.seconds(moved))


def test_passes_over_parameters_have_a_separate_factor() -> None:
    added = Operator("aten.add_", 0, 2 * 10**9, 10**9, (), 2)
    for kernels in (Kernels(1.5, 3.0, passes=1.2), Kernels(0.9, 0.9)):
        cost = DeviceCost(V100, "fp16", kernels)
        uncalibrated_s = DeviceCost(V100, "fp16").seconds(added)
        assert cost.seconds(added) == pytest.approx(kernels.passes * uncalibrated_s, rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "milliseconds"),
    [
        (1_210_807_296, 23.20 + 11.08 + 19.52 + 47.65 + 11.33),
        (1_016_024_576, 19.27 + 9.18 + 16.22 + 39.43 + 9.35),
        (1_136_305_152, 21.45 + 10.12 + 17.98 + 44.14 + 10.27),
        (1_061_898_240, 20.79 + 9.41 + 16.64 + 41.53 + 9.49),
        (1_013_084_160, 20.02 + 8.94 + 15.90 + 39.38 + 9.01),
    ],
)
def test_parameter_passes_on_v100_take_the_logged_time(parameters: int, milliseconds: float) -> None:
    """Timers of gradient copies for the reduction, copies to fp32, clipping, Adam and parameter copies: medians of the
    last stages in bigscience-workshop/bigscience experiments/gpt2-meg, 4 to 64 nodes."""
    point = calibration.calibration_point_of("softmax", V100)
    assert point is not None
    assert point.passes.value is not None
    cost = DeviceCost(V100, "fp16", MODELLED_KERNELS._replace(passes=point.passes.value))
    moved = {"aten.copy_": 12 + 6 + 6, "repro.norm_squared": 4, "aten._foreach_mul_": 8, "repro.adamw_": 28}
    seconds = sum(
        cost.seconds(Operator(name, 0, each * parameters, 0, (), 2)) for name, each in moved.items()
    )
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.02)
