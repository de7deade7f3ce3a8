"""What an engine says of itself, for the record of what it ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineReport:
    """Whose software executed an experiment."""

    name: str
    """Of the library, with its version: `DeepSpeed 0.19.8`."""
    theirs: str
    """Which parts of the step are the library's; the rest is this suite's."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """As the library was told, JSON data."""
