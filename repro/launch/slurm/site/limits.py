"""Time limits as SLURM writes them."""

from __future__ import annotations

import math
import re

from repro.config.errors import ConfigError

_FORM = re.compile(
    r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?$",
)
UNLIMITED = math.inf


def minutes(text: str) -> float:
    """Minutes of a limit: `90` (minutes), `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`.

    `UNLIMITED` and `infinite` are infinity.  Raises `ConfigError` for anything else.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "N/A"):
        return UNLIMITED
    found = _FORM.match(text.strip())
    if found is None:
        raise ConfigError("time_limit", text, "HH:MM:SS, D-HH:MM:SS or a number of minutes")
    days, first, second, third = (int(part) if part else None for part in found.group("d", "a", "b", "c"))
    assert first is not None
    if days is not None:
        return days * 1440 + first * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return first * 60 + (second or 0) + third / 60
    return first + (second or 0) / 60


def clock(total_minutes: float) -> str:
    """`HH:MM:SS`, with days where there are any: `1-02:30:00`."""
    if math.isinf(total_minutes):
        return "UNLIMITED"
    seconds = round(total_minutes * 60)
    days, seconds = divmod(seconds, 86400)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{days}-{text}" if days else text
