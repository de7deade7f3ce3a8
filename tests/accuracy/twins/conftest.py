"""Calibration file of an artificial machine with sixteen ranks, and a twin for the machine."""

from __future__ import annotations

from typing import Any

import pytest

from repro.accuracy.twins.derive import Twin, TwinOptions, derive
from repro.accuracy.twins.suite import named_comparisons
from repro.claims.run_commands import SuiteCatalogue
from repro.config.system import System
from repro.config.systems import parse_system
from repro.simulate.time.emulated import MESSAGE_CORES_FACT

RANKS = 16
LOWBW = ["deepspeed_lowbw/lowbw-megatron"]


def tables() -> dict[str, Any]:
    """Return a system file: 20 GFLOP/s per rank, and 2 ms per ring step of all ranks (4 ms with 1 MB per rank)."""

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "made up"}

    rate = {"fixed_s": 1e-4, "per_byte_s": 1e-10, "per_flop_s": 0.0}
    return {
        "devices_per_node": number(RANKS),
        "nodes": number(1),
        "context_bytes": number(0),
        "host_memory_bytes": number(16e9),
        "provenance": {
            "date": "2026-01-01",
            "torch": "2",
            "ranks": RANKS,
            "repeats": 1,
            "cores": 1,
            "facts": {MESSAGE_CORES_FACT: 1},
        },
        "device": {
            "name": "a processor",
            "memory_bytes": number(1e9),
            "memory_bandwidth": number(4e9),
            "peak_flops": {"fp32": number(20e9)},
            "time": {"jitter_s": number(1e-3)},
            "operators": {"elementwise": rate, "matmul": {**rate, "per_byte_s": 0.0, "per_flop_s": 5e-11}},
        },
        "links": {
            "memory": {
                "per": "device",
                "bandwidth": number(300e6),
                "latency_s": number(1e-3),
                "overlap_cost": number(0.5),
                "collectives": {"all_reduce": {"points": [[16e3, 30 * 2e-3], [16e6, 30 * 4e-3]]}},
            }
        },
    }


@pytest.fixture(scope="session")
def machine() -> System:
    return parse_system(tables(), name="here", file="here.toml")


@pytest.fixture(scope="session")
def catalogue() -> SuiteCatalogue:
    return SuiteCatalogue()


@pytest.fixture(scope="session")
def lowbw(machine: System, catalogue: SuiteCatalogue) -> Twin:
    return derive(named_comparisons(LOWBW, catalogue.suites)[0], machine, TwinOptions(width=400))
