"""Tests of the packaged suites: valid files and claims, and the smoke and engine suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import models, systems
from repro.model import counts
from tests import committed

FILES = sorted((Path(__file__).parents[3] / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_suite_is_valid_and_names_known_claims(path: Path) -> None:
    suite = committed.suite(path)
    assert suite.name == path.stem
    assert suite.description
    ids = {claim.id for claim in committed.ledger().claims}
    assert set(suite.claims) <= ids
    assert len(set(suite.claims)) == len(suite.claims)


def test_smoke_suite_has_its_experiments() -> None:
    suite = committed.suite(next(path for path in FILES if path.stem == "smoke"))
    names = {entry.experiment.name for entry in suite.entries}
    assert {f"states-z{z}-dp{dp}" for z in range(4) for dp in (1, 2, 4)} <= names
    assert {f"parity-z{z}-tp2-dp2" for z in range(4)} <= names
    assert all(entry.experiment.system == "local" for entry in suite.entries)
    assert suite.entry("limit-z0-dp2").expect == "oom"


def test_every_engine_with_a_strategy_is_compared_with_native() -> None:
    suite = committed.suite(next(path for path in FILES if path.stem == "engines"))
    compared = {row.baseline: set(row.subjects) for row in suite.comparisons}
    libraries = {"tp2": {"torch", "megatron"}, "pp2": {"torch", "megatron"}}
    libraries |= {f"z{z}": {"torch", "deepspeed"} | ({"megatron"} if z < 2 else set()) for z in range(4)}
    assert compared == {
        f"speed-native-{kind}": {f"speed-{name}-{kind}" for name in names}
        for kind, names in libraries.items()
    }


def test_smoke_memory_limit_is_a_fortieth_of_a_v100() -> None:
    """Both the memory of a V100 of a DGX-2 minus its context and the published model sizes are divided by 40."""
    suite = committed.suite(next(path for path in FILES if path.stem == "smoke"))
    v100 = systems.load_system_file("dgx2")
    for name, published in (
        ("-z0-dp2-1.16b", "zero-1.16b"),
        ("-z0-dp2", "zero-1.5b"),
        ("-z3-dp2", "zero-1.5b"),
    ):
        experiment = suite.entry(f"limit{name}").experiment
        full = v100.device.memory_bytes.known("memory") - v100.context()
        assert experiment.limits.memory_bytes == int(full / 40)
        assert counts.total_parameters(experiment.model) == pytest.approx(
            counts.total_parameters(models.load_model(published)) / 40, rel=1e-3
        )
