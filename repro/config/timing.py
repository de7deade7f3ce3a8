"""Achieved speed of a device for the time model: fractions of its peaks, fixed costs, and measured operators.

A missing or `"unknown"` number takes an assumed value (`ASSUMED`) from benchmarks of single matrix products, copies and
kernels. No assumed value is fitted to training runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from repro.config.errors import require
from repro.config.quantity import (
    UNSAID,
    Quantity,
    assumed_quantities,
    check_fraction,
    check_positive,
    check_whole,
)
from repro.config.sizes import POSITIVE_COUNT, at_least

ASSUMED = assumed_quantities("device")
"""Assumed values of a device's unknown efficiencies and fixed costs, with their sources, by key."""


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Fractions of a device's peaks that it reaches, and fixed costs of an operator: table `[device.time]`."""

    matmul_efficiency: Quantity = UNSAID
    """Fraction of `peak_flops` that the largest matrix products reach (fp16 or bf16 on tensor cores)."""
    unthrottled_efficiency: Quantity = UNSAID
    """Fraction of `peak_flops` that matrix products reach per busy multiprocessor at the full clock rate.

    It is at least `matmul_efficiency`, which includes the lower clock rate under the power limit.
    """
    memory_efficiency: Quantity = UNSAID
    """Fraction of `memory_bandwidth` that a streaming kernel reaches."""
    multiprocessors: Quantity = UNSAID
    """Number of streaming multiprocessors. A matrix product runs in waves of this number of tiles."""
    kernel_s: Quantity = UNSAID
    """Time between the starts of two consecutive shortest kernels, in seconds: the fixed time of any kernel."""
    fill_s: Quantity = UNSAID
    """Additional time of a kernel that reads memory, in seconds, since its first reads and its last blocks do not use
    the full bandwidth."""
    launch_s: Quantity = UNSAID
    """Host time per operator of eager PyTorch in the forward pass and the optimizer, in seconds."""
    backward_launch_s: Quantity = UNSAID
    """Host time per operator in the backward pass, in seconds; one autograd thread launches all its operators."""
    pace: Quantity = UNSAID
    """Ratio of kernel times on a run's devices to kernel times on the device for which the time model is calibrated."""
    spread: Quantity = UNSAID
    """Standard deviation over mean of a step's kernel time between the devices of a run, which wait for the slowest."""
    jitter_s: Quantity = UNSAID
    """Variance of the duration of a sequence of kernels, divided by the mean duration, in seconds. Each collective
    waits for the last rank of its group (`repro.simulate.time.device`)."""
    unaligned_flops: Quantity = UNSAID
    """FLOP/s of matrix products with sizes that are not multiples of 8, for which tensor cores may be unavailable."""

    def __post_init__(self) -> None:
        for key in ("matmul_efficiency", "unthrottled_efficiency", "memory_efficiency"):
            check_fraction(key, getattr(self, key))
        check_whole("multiprocessors", self.multiprocessors)
        check_positive("unaligned_flops", self.unaligned_flops)
        check_positive("pace", self.pace)
        for ratio in self.spread.ends:
            require(ratio < 1, "spread", ratio, "less than 1, as a standard deviation over the mean")

    def used(self, key: str) -> Quantity:
        """Return the device's number with the key `key`; if unknown, the assumed number, marked as assumed."""
        known: Quantity = getattr(self, key)
        return known.or_assumed(ASSUMED.get(key))

    def numbers(self) -> Timing:
        """Return all efficiencies and fixed costs of the device, with assumed values for uncertain inputs."""
        values = {field.name: self.used(field.name).value for field in fields(self)}
        return Timing(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Efficiencies and fixed costs of a device, without sources and with assumed values for uncertain inputs."""

    matmul_efficiency: float
    unthrottled_efficiency: float | None
    memory_efficiency: float
    multiprocessors: float
    kernel_s: float
    fill_s: float
    launch_s: float
    backward_launch_s: float | None
    pace: float
    spread: float
    jitter_s: float
    unaligned_flops: float | None


UNALIGNED_MATMUL = "unaligned_matmul"
"""Operator name of matrix products with a size that is not a multiple of 8 elements, which tensor cores read slowly."""
MESSAGE = "message"
"""Name, as an operator, of the computing thread's processor work to start and complete one message."""
EXCHANGE = "exchange"
"""Name, as an operator, of the computing thread's processor work per message of a collective in which each rank sends
to all others (`repro.parallel.ledger.EXCHANGED`)."""


@dataclass(frozen=True, kw_only=True)
class OperatorRate:
    """Measured rate of an operator: seconds of a call = fixed + bytes * per_byte + flops * per_flop.

    Calibrated files list it in `[device.operators.NAME]`. NAME is an operator of a trace (`aten.mm`, `repro.adamw_`,
    ...). `matmul` and `elementwise` apply to operators without a separate table. `unaligned_matmul` applies to products
    with sizes that are not multiples of 8, and `message` and `exchange` to the computing thread's work on a message.
    """

    fixed_s: float
    per_byte_s: float = 0.0
    per_flop_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, ("fixed_s", "per_byte_s", "per_flop_s"), 0, "seconds, 0 or more")

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the duration of one operator call, in seconds, that executes `flops` and reads and writes `nbytes`."""
        return self.fixed_s + nbytes * self.per_byte_s + flops * self.per_flop_s

    def slowed(self, times: float) -> OperatorRate:
        """Return the measured rate of an operator, slowed down by the factor `times`."""
        return OperatorRate(**{key: value * times for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Date, software and machine of the measurements in a calibrated system file: its table `[provenance]`."""

    date: str
    """Date of the measurement, ISO 8601."""
    torch: str
    """Version of torch."""
    ranks: int
    """Number of rank processes (one per device) that measured at the same time."""
    repeats: int
    """Number of repeated measurements behind each number of the file."""
    cores: int = 0
    """Number of processor cores that the ranks of a node shared; 0: every rank had its own device."""
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """Further conditions of the measurement: processor, cores, driver, NCCL."""

    def __post_init__(self) -> None:
        at_least(self, ("ranks", "repeats"), 1, POSITIVE_COUNT)
