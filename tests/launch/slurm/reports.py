"""Invented node reports of tasks and their GPUs."""

from __future__ import annotations

from typing import Any

from repro.launch.slurm.allocation.nodes import NodeReport

V100 = ("Tesla V100-SXM3-32GB", 34_057_748_480, "7.0")


def card(name: str, memory: int, capability: str, number: int) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": name, "memory_bytes": memory, "compute_capability": capability}


def node(
    name: str, index: int, kind: tuple[str, int, str], *, tasks: int = 16, bound: bool = False
) -> list[NodeReport]:
    """Return the reports of all tasks of a node; with `bound`, each task sees one GPU."""
    cards = [card(*kind, number) for number in range(tasks)]
    return [
        NodeReport(node=name, local=i, task=index * tasks + i,
               gpus=[cards[i]] if bound else cards)
        for i in range(tasks)
    ]  # fmt: skip
