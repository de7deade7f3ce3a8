"""What a stage does, as megatron-core tells it: its `timers` are started and stopped around each pass and message."""

from __future__ import annotations

from repro.config.enums import Phase
from repro.parallel.pipeline.runner import Observer

_PHASES = {
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "all-grads-sync": Phase.BACKWARD,
}


class Passes:
    """Stands for the library's `Timers`: reports phases, and keeps the order of forwards and backwards."""

    def __init__(self, stages: int) -> None:
        self.order: list[str] = []
        """`F` and `B` of the step, as they began."""
        self.in_flight = 0
        """Most (micro-batch, chunk) pairs that were between forward and backward at once."""
        self._stages = stages
        self._observe: Observer = lambda phase: None

    def begin(self, observe: Observer) -> None:
        """A step begins."""
        self._observe, self.order = observe, []

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        return _Timer(self, name)

    def started(self, name: str) -> None:
        """Something of that name begins."""
        if name in _PHASES:
            self._observe(_PHASES[name])
        elif self._stages > 1 and ("recv" in name or "send" in name or name == "embedding-grads-all-reduce"):
            # Interleaved schedules begin messages here and wait for them before the next pass.
            self._observe(Phase.IDLE)
        if name.endswith("-compute"):
            self.order.append(name[0].upper())
            self.in_flight = max(self.in_flight, self.order.count("F") - self.order.count("B"))


class _Timer:
    """One of the library's timers, which does not measure."""

    def __init__(self, passes: Passes, name: str):
        self._passes, self._name = passes, name

    def start(self, barrier: bool = False) -> None:
        """What it stands for begins."""
        self._passes.started(self._name)

    def stop(self, barrier: bool = False) -> None:
        """What follows is reported when it begins."""
