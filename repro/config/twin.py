"""What a small experiment stands for: the published one, and the numbers in which the two are alike or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.config.errors import require

RATIO = "FLOP/s of a device over the baseline's, predicted"
"""The number that a twin is for."""


@dataclass(frozen=True, kw_only=True)
class TwinOf:
    """Written by `repro twin`, carried by the record; nothing of a run depends on it."""

    original: str
    """Name of the published experiment."""
    part: float
    """k: the twin's width over the original's."""
    between: float = 0.0
    """Bytes/s of a node's link to the others in the original; 0 on one node."""
    within: float = 0.0
    """Bytes/s of a device's link inside a node of the original."""
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """Dimensionless, of the original and of the twin: both predicted by the time model where the suite was made."""

    def __post_init__(self) -> None:
        pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in self.numbers.items()}
        object.__setattr__(self, "numbers", pairs)  # JSON has lists
        require(self.part > 0, "part", self.part, "more than 0")
        for key in ("between", "within"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 (none) or more")
