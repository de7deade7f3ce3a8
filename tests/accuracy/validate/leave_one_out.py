"""Coverage of the intervals of a device that no run calibrates, from devices that are calibrated.

Each kind of device is left out in turn: its kernels get the range that the calibrations of the other devices give, and
its published rates are predicted with this range. `python -m tests.accuracy.validate.leave_one_out` prints the table of
docs/accuracy.md in some minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

from repro.accuracy.validate.published import RATE, Point, points
from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.config import systems
from repro.config.quantity import Quantity
from repro.config.suites import load_suite
from repro.launch.simulated import simulate_experiment, simulated_system
from repro.simulate.time import calibration
from repro.simulate.time.calibration import Generation, MeasuredKernels
from repro.simulate.time.predict import calibrated_kernels

DEVICES = {"V100": "7.0", "A100": "8.0", "H100": "9.0", "B200": "10.0"}
PEAKS = {"7.0": 125e12, "8.0": 312e12, "9.0": 989.4e12, "10.0": 2250e12}
"""FLOP/s of 16-bit products by compute capability, from the data sheets."""
SUITES = (
    *("zero_memory", "turing_nlg", "deepspeed_lowbw", "deepspeed_64gpu", "deepspeed_dgx2", "zero_throughput"),
    *("zero_superlinear", "megatron_2019", "megatron_2021", "megatron_figures", "v100_clusters"),
    *("a100_clusters", "yuan", "one_node", "today", "b200", "a100_pcie"),
)


def quantity_of(values: Sequence[float], scale: float = 1.0) -> Quantity:
    """Return the median of `values`, with ends twice as far on a logarithmic scale as the minimum and maximum."""
    middle = median(values)
    ends = (min(values) ** 2 / middle * scale, max(values) ** 2 / middle * scale)
    source = "other devices; low: other devices; high: other devices"
    return Quantity(value=middle * scale, low=ends[0], high=ends[1], source=source)


def kernels_of_others(generations: Sequence[Generation], capability: str) -> MeasuredKernels:
    """Return the range that the calibrations of other devices give for a device of this compute capability."""
    kernels = [calibrated_kernels(generation) for generation in generations]
    shares = [
        one.attention / PEAKS[generation.compute_capability]
        for one, generation in zip(kernels, generations, strict=True)
        if one.attention
    ]
    return replace(
        calibration.uncalibrated_kernels(systems.load_system_file("dgx-b200")),
        products=quantity_of([one.products for one in kernels]),
        others=quantity_of([one.others for one in kernels]),
        passes=quantity_of([one.passes for one in kernels]),
        attention=quantity_of(shares, PEAKS[capability]),
    )


def predicted_rates(device: str, step: int = 1) -> list[Point]:
    """Return every `step`-th published rate of `device`, predicted without its calibration."""
    capability = DEVICES[device]
    generations = [*calibration.calibration_points(), *calibration.measured_kernels()]
    others = [one for one in generations if one.compute_capability != capability]
    found = kernels_of_others(others, capability)
    systems_here = systems.system_names()
    on_device = [
        (suite, entry.experiment, system)
        for suite in SUITES
        for entry in load_suite(Path(f"suites/{suite}.toml")).entries
        if entry.experiment.system in systems_here
        and (system := simulated_system(entry.experiment)).device.compute_capability == capability
    ]
    points_of_others = tuple(one for one in others if isinstance(one, calibration.CalibrationPoint))
    measured_on_others = tuple(one for one in others if isinstance(one, MeasuredKernels))
    with (
        patch.object(calibration, "uncalibrated_kernels", lambda system: found),
        patch.object(calibration, "calibration_points", lambda: points_of_others),
        patch.object(calibration, "measured_kernels", lambda: measured_on_others),
    ):
        records = [
            simulate_experiment(experiment, system, suite) for suite, experiment, system in on_device[::step]
        ]
        judged = judge(load_ledger(), records)
        return [one for one in points(judged, records) if one.kind == RATE and not one.left_out]


if __name__ == "__main__":
    for device in DEVICES:
        rates = predicted_rates(device)
        covered, error = sum(rate.holds for rate in rates), median(abs(rate.error) for rate in rates)
        print(f"| {device} | {len(rates)} | {covered} | {100 * error:.1f} |", flush=True)
