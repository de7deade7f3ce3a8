"""Calibration file of an artificial machine with sixteen ranks, and a twin for the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.twins.derive import Twin, TwinOptions, derive
from repro.accuracy.twins.suite import NamedTwin, named_comparisons, suite_text
from repro.claims.run_commands import SuiteCatalogue
from repro.config import suites
from repro.config.suites import Suite
from repro.config.system import System
from repro.config.systems import parse_system
from repro.simulate.time.emulated import MESSAGE_CORES_FACT

RANKS = 16
LOWBW = "deepspeed_lowbw/lowbw-megatron"


def tables() -> dict[str, Any]:
    """Return a system file: 20 GFLOP/s per rank, and 2 ms per ring step of all ranks (4 ms with 1 MB per rank)."""

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "made up"}

    counts = {"ranks": RANKS, "repeats": 1, "cores": 1}
    rate = {"fixed_s": 1e-4, "per_byte_s": 1e-10, "per_flop_s": 0.0}
    return {
        "devices_per_node": number(RANKS),
        "nodes": number(1),
        "context_bytes": number(0),
        "host_memory_bytes": number(16e9),
        "provenance": {"date": "2026-01-01", "torch": "2", "facts": {MESSAGE_CORES_FACT: 1}, **counts},
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


TwinOf = Callable[..., Twin]


@pytest.fixture(scope="session")
def twin_of(machine: System, catalogue: SuiteCatalogue) -> TwinOf:
    """Return the function that derives the twin of the experiments that one name selects."""

    def function(name: str, on: System = machine, **options: Any) -> Twin:
        return derive(named_comparisons([name], catalogue.suites)[0], on, TwinOptions(**options))

    return function


@pytest.fixture(scope="session")
def lowbw(twin_of: TwinOf) -> Twin:
    return twin_of(LOWBW, width=400)


@pytest.fixture(scope="session")
def dgx2_4b(twin_of: TwinOf) -> Twin:
    return twin_of("deepspeed_64gpu/64gpu-4b-megatron", width=288)


def written_suite(file: Path, *twins: NamedTwin) -> Suite:
    """Write the suite of `twins` to a file, and return the suite that the file contains."""
    file.write_text(suite_text(twins, file=str(file), name=file.stem, arguments="", claims=()))
    return suites.load_suite(file)
