"""Times of the cases as a table and as data: GB/s, the share of a copy's, and how often the others take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from repro.kernels.bench.case import OURS


@dataclass(frozen=True)
class BenchRow:
    """One case done by one of its ways."""

    case: str
    who: str
    dtype: str
    seconds: float
    """Median, of the device."""
    nbytes: int
    goal: float
    overhead_s: float | None = None
    """Seconds of the host to queue a call on small tensors; known of our kernels."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the operators had to move."""
        return self.nbytes / self.seconds


def render(rows: Sequence[BenchRow], copy: float) -> list[str]:
    """Lines of a table; `copy` in bytes a second. Each case begins with our kernel."""
    lines = [
        f"copy: {copy / 1e9:,.0f} GB/s",
        f"{'':<32}{'':<6}{'':<16}{'us':>10}{'GB/s':>9}{'of copy':>9}{'goal':>7}{'x kernel':>10}{'queue us':>10}",
    ]
    last = ("", "")
    for row in _sorted(rows):
        ours = _of(rows, row, OURS)
        head = (row.case, row.dtype)
        name, dtype = head if head != last else ("", "")
        last = head
        share, goal = row.bandwidth / copy, f"{row.goal:.0%}" if row.goal and row.who == OURS else ""
        missed = " *" if row.who == OURS and row.goal and share < row.goal else ""
        times = f"{row.seconds / ours.seconds:.2f}" if ours else ""
        queue = f"{row.overhead_s * 1e6:.1f}" if row.overhead_s is not None else ""
        lines.append(
            f"{name:<32}{dtype:<6}{row.who:<16}{row.seconds * 1e6:>10.1f}{row.bandwidth / 1e9:>9.0f}"
            f"{share:>9.0%}{goal:>7}{times:>10}{queue:>10}{missed}"
        )
    if any(line.endswith(" *") for line in lines):
        lines.append("* below its goal, which is for an H200 or A100")
    slower = sorted({f"{row.case} {row.dtype}: {row.who}" for row in rows if _faster(rows, row)})
    return lines + [f"faster than the kernel: {text}" for text in slower]


def as_data(rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """The rows as plain data, in the order of the table, with their `bytes_per_s`."""
    return [{**asdict(row), "bytes_per_s": row.bandwidth} for row in _sorted(rows)]


def _of(rows: Sequence[BenchRow], like: BenchRow, who: str) -> BenchRow | None:
    same = (row for row in rows if (row.case, row.dtype, row.who) == (like.case, like.dtype, who))
    return next(same, None)


def _faster(rows: Sequence[BenchRow], row: BenchRow) -> bool:
    ours = _of(rows, row, OURS)
    return ours is not None and row.seconds < ours.seconds


def _sorted(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """By case and dtype as they came, our kernel first."""
    order = {key: i for i, key in enumerate(dict.fromkeys((row.case, row.dtype) for row in rows))}
    return sorted(rows, key=lambda row: (order[row.case, row.dtype], row.who != OURS))
