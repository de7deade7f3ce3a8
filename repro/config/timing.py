"""Achieved speed of a device, for the time model: fractions of its peaks, fixed costs, and measured operators.

A missing or `"unknown"` number takes an assumed value (`ASSUMED`) from benchmarks of single matrix products, copies and
kernels.  No assumed value is fitted to training runs.
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
"""Assumed values, with their sources, for unknown numbers of `DeviceTime`, by key."""


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """`[device.time]` of a system: fractions of the peaks that a device reaches, and fixed costs of an operator."""

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
    """Seconds between the starts of two consecutive shortest kernels, which is the fixed time of any kernel."""
    fill_s: Quantity = UNSAID
    """Additional seconds of a kernel that reads memory, while its first reads and its last blocks do not use the full
    bandwidth."""
    launch_s: Quantity = UNSAID
    """Host seconds per operator of eager PyTorch in the forward pass and the optimizer."""
    backward_launch_s: Quantity = UNSAID
    """Host seconds per operator in the backward pass, in which one autograd thread launches all operators."""
    pace: Quantity = UNSAID
    """Kernel time of a run's devices, relative to the device on which the time model is calibrated."""
    spread: Quantity = UNSAID
    """Standard deviation over mean of a step's kernel time between the devices of a run, which wait for the slowest."""
    jitter_s: Quantity = UNSAID
    """Variance over mean, in seconds, of the duration of consecutive kernels over time. Each collective waits for the
    last rank of its group (`repro.simulate.time.device`)."""
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
        """Return the number of `key`, or the assumed number, marked as assumed, if it is unknown."""
        known: Quantity = getattr(self, key)
        return known.or_assumed(ASSUMED.get(key))

    def numbers(self) -> Timing:
        """Return all numbers, with assumed values for unknown ones."""
        values = {field.name: self.used(field.name).value for field in fields(self)}
        return Timing(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Values of `DeviceTime` without their sources, with assumed values for unknown ones."""

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
"""Name of matrix products with a size that is not a multiple of 8 elements, which tensor cores read slowly."""
MESSAGE = "message"
"""Name of the processor work of a computing thread to start and end one message."""
EXCHANGE = "exchange"
"""Name of the processor work of a computing thread per message of a collective in which each rank sends to all others
(`repro.parallel.ledger.EXCHANGED`)."""


@dataclass(frozen=True, kw_only=True)
class OperatorRate:
    """`[device.operators.NAME]` of a calibrated file: seconds = fixed + bytes * per_byte + flops * per_flop.

    NAME is an operator of a trace (`aten.mm`, `repro.adamw_`, ...).  `matmul` and `elementwise` apply to operators
    without their own table.  `unaligned_matmul` applies to products with sizes that are not multiples of 8, and
    `message` and `exchange` to the computing thread's work on a message.  Bytes are read and written bytes.
    """

    fixed_s: float
    per_byte_s: float = 0.0
    per_flop_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, ("fixed_s", "per_byte_s", "per_flop_s"), 0, "seconds, 0 or more")

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the seconds of one call that executes `flops` and reads and writes `nbytes`."""
        return self.fixed_s + nbytes * self.per_byte_s + flops * self.per_flop_s

    def slowed(self, times: float) -> OperatorRate:
        """Return the rate multiplied by `times`, for an operator that takes `times` as long."""
        return OperatorRate(**{key: value * times for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """`[provenance]` of a calibrated file: date, software and machine of the measurements."""

    date: str
    """Date of the measurement, ISO 8601."""
    torch: str
    """Version of torch."""
    ranks: int
    """Number of processes (one per device) that measured together."""
    repeats: int
    """Number of measurements per published number."""
    cores: int = 0
    """Number of processor cores that the ranks of a node shared; 0: every rank had its own device."""
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """Further conditions of the measurement: processor, cores, driver, NCCL."""

    def __post_init__(self) -> None:
        at_least(self, ("ranks", "repeats"), 1, POSITIVE_COUNT)
