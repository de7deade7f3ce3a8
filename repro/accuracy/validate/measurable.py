"""What would measure a number that is not known: the fact of `repro calibrate`'s document, or what else."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

HERE = "repro calibrate --system local-gpu --output FILE.toml"
CLUSTER = "repro calibrate --system {system} --profile SITE.toml --nodes 2 --output FILE.toml"


@dataclass(frozen=True)
class Measurement:
    """How one unknown is measured on a machine that has it."""

    command: str
    """Of this suite; empty where it has none."""
    fact: str
    """Key of the system file which that command writes; empty with the command."""
    how: str
    """What that fact says of it; without a command, what would say it."""


OPERATORS = "seconds of every operator on the devices that are there, which need no pace then"
PRODUCTS = "the fastest product of all ranks at once; the peak is then what is reached"
COPIES = "a copy of four caches on all ranks at once; the bandwidth is then what is reached"
LINK = "collectives by size in every group of a layout, all groups at once, in place of the formula"
BESIDE = "products by themselves and beside a collective"
UNITS = "seconds of every operator on the devices that are there, in place of waves of tiles"
MEMORY = "what the driver says that the device has"
_HOW = (
    ("device.memory_bytes", HERE, "device.memory_bytes", MEMORY),
    ("device.time.multiprocessors", HERE, "device.operators", UNITS),
    ("device.time.unthrottled_efficiency", HERE, "device.operators", UNITS),
    ("device.time.pace", HERE, "device.operators", OPERATORS),
    ("device.time.spread", "", "", "the same products on every device of the cluster, each by itself"),
    ("device.time.matmul_efficiency", HERE, "device.peak_flops", PRODUCTS),
    ("device.peak_flops.*", HERE, "device.peak_flops", PRODUCTS),
    ("device.time.memory_efficiency", HERE, "device.memory_bandwidth", COPIES),
    ("device.memory_bandwidth", HERE, "device.memory_bandwidth", COPIES),
    ("device.time.kernel_s", HERE, "device.time.kernel_s", "an element-wise operator on no bytes"),
    ("device.time.fill_s", HERE, "device.operators", OPERATORS),
    ("device.time.launch_s", HERE, "device.time.launch_s", "a step that has nothing to compute, by operator"),
    ("links.pcie.bandwidth", HERE, "links.pcie.bandwidth", "pinned memory to all devices of a node at once"),
    ("links.inter-node.overlap_cost", CLUSTER, "links.inter-node.overlap_cost", BESIDE),
    ("links.*.overlap_cost", HERE, "links.{link}.overlap_cost", BESIDE),
    ("links.inter-node.*", CLUSTER, "links.inter-node.collectives", LINK),
    ("links.*", HERE, "links.{link}.collectives", LINK),
    ("kernels", HERE, "device.operators", "seconds of the operators themselves, of each set of kernels"),
    ("*: operator_s", HERE, "device.time.launch_s", "a step that has nothing to compute, by operator"),
    ("*: attention", HERE, "device.operators", "seconds of every operator, attention among them"),
    ("*: passes", HERE, "device.operators", "seconds of every operator, passes over parameters among them"),
    (
        "*: products",
        HERE,
        "device.operators",
        "seconds of products and of every other operator, each by itself",
    ),
    (
        "*: FLOP/s",
        "",
        "",
        "the published run again with software of that time, its steps timed to three digits",
    ),
    ("*", "", "", "a benchmark of it alone: repro calibrate takes it as it is"),
)
"""Patterns of keys, the first that matches: command, fact, and how."""


def measurement(key: str, system: str) -> Measurement:
    """What measures the unknown `key` of `system`."""
    command, fact, how = next(entry[1:] for entry in _HOW if fnmatchcase(key, entry[0]))
    link = key.split(".")[1] if key.startswith("links.") else ""
    return Measurement(command.format(system=system), fact.format(link=link), how)
