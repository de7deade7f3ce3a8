"""What pages about simulated steps are made of: a layout in words, plain tables, bytes and bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.config import Layout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 24
GB = 1e9
KERNELS = {
    "reference": "torch's operators in place of kernels",
    "softmax": "operators of 2020 (softmax fused)",
    "unfused": "operators of 2019 (unfused)",
}


def layout_words(layout: Layout) -> str:
    """A layout in words: degrees, ZeRO stage, batches and what else is switched on."""
    parts = [f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}", f"ZeRO {layout.zero}", layout.precision]
    parts += [f"micro-batch {layout.micro_batch} of {layout.global_batch}"]
    if layout.pp > 1:
        chunks = f" with {layout.chunks} chunks" if layout.chunks > 1 else ""
        parts.append(f"{layout.schedule}{chunks}, {layout.accumulation} micro-batches")
    names = {
        "recompute": "recomputation",
        "sp": "sequence parallelism",
        "pa": "P_a",
        "pa_cpu": "P_a+cpu",
        "md": "M_D",
        "scatter_gather": "scatter/gather",
    }
    parts += [words for key, words in names.items() if getattr(layout, key)]
    if not layout.cb:
        parts.append("without C_B")
    if layout.zero1_reduce != "reduce-scatter":
        parts.append(f"ZeRO 1 by {layout.zero1_reduce}")
    if layout.kernels != "fused":
        parts.append(KERNELS[layout.kernels])
    if layout.overlap and not layout.gather_overlap:
        parts.append("parameters gathered before the step")
    if not layout.overlap:
        parts.append("gradients reduced after backward" if layout.zero < 2 else "reductions waited for")
    return ", ".join(parts)


def table(*headings: str, left: int = 1, gap: int = 2) -> Table:
    """A plain table: the first `left` columns are text, the rest numbers; nothing is cut or wrapped."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return made


def gb(size: float | None) -> str:
    """Bytes in GB with two decimals; `-` where there is nothing to say."""
    return "-" if size is None else f"{size / GB:,.2f}"


def bar(console: Console, size: float, whole: float, width: int = BAR, *, room: bool = True) -> str:
    """`size` of `whole` as a bar of `width` columns; with `room`, what is left is shown as well."""
    full, empty = ("█", "░") if console.encoding.startswith("utf") else ("#", ".")
    filled = min(width, round(width * size / whole)) if whole else 0
    return full * filled + (empty * (width - filled) if room else "")
