"""How the GPUs of a node are joined, by the driver's word, and which switches the node hangs on, by SLURM's."""

from __future__ import annotations

from typing import Any


def switches(environment: dict[str, str]) -> str:
    """The path of switches above this node, `core.rack1`; empty where the site's SLURM knows of none.

    SLURM sets `SLURM_TOPOLOGY_ADDR` to `core.rack1.n1` and its pattern to `switch.switch.node`.
    """
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds):
        return ""
    return ".".join(name for name, kind in zip(names, kinds, strict=True) if kind == "switch")


def gpu_links() -> dict[str, Any]:
    """`nvlinks`: active NVLinks of each GPU of this node; `pcie`: what the PCIe paths of its pairs cross.

    Empty without a driver or with one that does not say.
    """
    from repro.measure.provenance import nvml

    with nvml() as n:
        if n is None:
            return {}
        levels = {
            n.NVML_TOPOLOGY_INTERNAL: "one board",
            n.NVML_TOPOLOGY_SINGLE: "one switch",
            n.NVML_TOPOLOGY_MULTIPLE: "several switches",
            n.NVML_TOPOLOGY_HOSTBRIDGE: "a host bridge",
            n.NVML_TOPOLOGY_NODE: "host bridges of one socket",
            n.NVML_TOPOLOGY_SYSTEM: "the link between sockets",
        }
        handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
        pairs = [(a, b) for i, a in enumerate(handles) for b in handles[i + 1 :]]
        try:
            crossed = [levels.get(n.nvmlDeviceGetTopologyCommonAncestor(a, b), "unknown") for a, b in pairs]
        except n.NVMLError:
            crossed = []
        found: dict[str, Any] = {"nvlinks": [_nvlinks(n, handle) for handle in handles]}
        return found | {"pcie": {word: crossed.count(word) for word in sorted(set(crossed))}}


def _nvlinks(n: Any, handle: Any) -> int:
    """Links that are up; a card without any refuses the question, one with few refuses it for the others."""
    count = 0
    for link in range(n.NVML_NVLINK_MAX_LINKS):
        try:
            count += n.nvmlDeviceGetNvLinkState(handle, link) == n.NVML_FEATURE_ENABLED
        except n.NVMLError:
            break
    return count
