"""Tests of the packaged suites: valid files and claims, compared layouts, and the limits of the smoke suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.config import models, systems
from repro.model.counts import total_parameters
from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_suite_is_valid_and_names_known_claims(path: Path) -> None:
    suite = committed.suite(path)
    assert suite.name == path.stem
    assert suite.description
    assert set(suite.claims) <= {claim.id for claim in committed.ledger().claims}
    assert len(set(suite.claims)) == len(suite.claims)


def test_compared_layouts_differ_only_in_their_operators() -> None:
    suite = committed.suite(FOLDER / "kernels.toml")
    assert len(suite.comparisons) == 7
    for comparison in suite.comparisons:
        members = [suite.entry(name).experiment for name in (comparison.baseline, *comparison.subjects)]
        assert len({e.layout.kernels for e in members}) == len(members) == 3
        assert len({replace(e.layout, kernels="fused") for e in members}) == 1


def test_every_engine_with_a_strategy_is_compared_with_native() -> None:
    suite = committed.suite(FOLDER / "engines.toml")
    compared = {row.baseline: set(row.subjects) for row in suite.comparisons}
    libraries = {"tp2": {"torch", "megatron"}, "pp2": {"torch", "megatron"}}
    libraries |= {f"z{z}": {"torch", "deepspeed"} | ({"megatron"} if z < 2 else set()) for z in range(4)}
    assert compared == {
        f"speed-native-{kind}": {f"speed-{name}-{kind}" for name in names}
        for kind, names in libraries.items()
    }


def test_smoke_memory_limit_is_a_fortieth_of_a_v100() -> None:
    """Both the memory of a V100 of a DGX-2 minus its context and the published model sizes are divided by 40."""
    suite = committed.suite(FOLDER / "smoke.toml")
    assert suite.entry("limit-z0-dp2").expect == "oom"
    assert all(entry.experiment.system == "local" for entry in suite.entries)
    v100 = systems.load_system_file("dgx2")
    full = v100.device.memory_bytes.known("memory") - v100.context()
    published = {"z0-dp2-1.16b": "zero-1.16b", "z0-dp2": "zero-1.5b", "z3-dp2": "zero-1.5b"}
    for name, model in published.items():
        experiment = suite.entry(f"limit-{name}").experiment
        assert experiment.limits.memory_bytes == int(full / 40)
        size = total_parameters(models.load_model(model)) / 40
        assert total_parameters(experiment.model) == pytest.approx(size, rel=1e-3)
