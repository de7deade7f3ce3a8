"""Real speed of a device: the part of a system that only the time model needs.

A missing or `"unknown"` key takes a constant of `ASSUMED`, which `repro systems` shows as assumed.  The constants are
not fitted to runs of models: they come from benchmarks of single products, copies and kernels.
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
"""Assumed values, with their sources, for keys of `DeviceTime` that a system does not know."""


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """`[device.time]`: fractions of its peaks that a device reaches, and fixed costs of an operator."""

    matmul_efficiency: Quantity = UNSAID
    """Fraction of `peak_flops` that the largest matrix products reach (fp16 or bf16 on tensor cores)."""
    unthrottled_efficiency: Quantity = UNSAID
    """Fraction of `peak_flops` that the products would reach if power did not slow the clock, per busy multiprocessor.

    It is at least `matmul_efficiency`, which bounds the efficiency of all multiprocessors together.
    """
    memory_efficiency: Quantity = UNSAID
    """Fraction of `memory_bandwidth` that a streaming kernel reaches."""
    multiprocessors: Quantity = UNSAID
    """Streaming multiprocessors: a product runs in waves of this number of tiles."""
    kernel_s: Quantity = UNSAID
    """Seconds from the start of the shortest kernel to that of the next: the fixed time of any kernel."""
    fill_s: Quantity = UNSAID
    """Additional seconds of a kernel that moves bytes from memory: the time until all bytes are in flight, and after
    the first blocks are done."""
    launch_s: Quantity = UNSAID
    """Seconds of the host for one operator of eager PyTorch, in the forward pass and the optimizer."""
    backward_launch_s: Quantity = UNSAID
    """Seconds of the host for one operator of the backward pass, where autograd's one thread launches all operators."""
    pace: Quantity = UNSAID
    """Seconds of a run's kernels over those of the device that these numbers or a published point describe."""
    spread: Quantity = UNSAID
    """Standard deviation over mean of the kernel time of a step on the devices of a run; all wait for the slowest
    (`repro.simulate.time.device`)."""
    jitter_s: Quantity = UNSAID
    """Variance over mean of the time of consecutive kernels from one moment to another; each collective waits for the
    last rank of its group (`repro.simulate.time.device`)."""
    unaligned_flops: Quantity = UNSAID
    """FLOP/s of products whose sizes are not multiples of 8, which tensor cores may not support."""

    def __post_init__(self) -> None:
        for key in ("matmul_efficiency", "unthrottled_efficiency", "memory_efficiency"):
            check_fraction(key, getattr(self, key))
        check_whole("multiprocessors", self.multiprocessors)
        check_positive("unaligned_flops", self.unaligned_flops)
        check_positive("pace", self.pace)
        for ratio in self.spread.ends:
            require(ratio < 1, "spread", ratio, "less than 1: a standard deviation over the mean")

    def used(self, key: str) -> Quantity:
        """Return the number of `key`, or if it is unknown that of `ASSUMED`, whose source is marked as assumed."""
        known: Quantity = getattr(self, key)
        return known.or_assumed(ASSUMED.get(key))

    def numbers(self) -> Timing:
        """Return the value of every key, known or assumed."""
        values = {field.name: self.used(field.name).value for field in fields(self)}
        return Timing(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Numbers of `DeviceTime`, known or assumed."""

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
"""Operator for matrix products with a size that is no multiple of 8 elements, which tensor cores read slowly."""
MESSAGE = "message"
"""Operator for a thread's own work to start and end a message, which is no operator of a step."""
EXCHANGE = "exchange"
"""Operator for a thread's own work on one message of a collective in which each rank sends to every other
(`repro.parallel.ledger.EXCHANGED`)."""


@dataclass(frozen=True, kw_only=True)
class OperatorRate:
    """`[device.operators.NAME]` of a calibrated file: seconds = fixed + bytes * per_byte + flops * per_flop.

    NAME is an operator's name in a trace (`aten.mm`, `repro.adamw_`, ...).  `matmul` and `elementwise` stand for all
    other operators.  `unaligned_matmul` stands for products whose sizes are not multiples of 8.  `message` and
    `exchange` are the work of the computing thread to start and end a message.  Bytes are those read and written.
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
        """Return the rate of an operator that is slower by the factor `times`."""
        return OperatorRate(**{key: value * times for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """`[provenance]` of a calibrated file: measurements and machine; names only of a cluster's nodes."""

    date: str
    """Date, ISO 8601."""
    torch: str
    """Version of torch."""
    ranks: int
    """Processes (devices) of the measured group."""
    repeats: int
    """Measurements behind each number."""
    cores: int = 0
    """Processor cores that the ranks of a node shared; 0: every rank had its own device."""
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """Further conditions of the numbers: processor, cores, driver, NCCL."""

    def __post_init__(self) -> None:
        at_least(self, ("ranks", "repeats"), 1, POSITIVE_COUNT)
