"""Tests of named emulated networks and of models in a suite file."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.config import EmulatedNetwork, suites
from repro.config.errors import ConfigError
from tests.launch.runs import MODEL

TEXT = """
[suite]
name = "s"
[defaults]
model = "tiny.toml"
layout.dp = 4
[networks.slow]
nodes = 2
ranks_per_node = 2
between = 8e6
within = 20e6
[[experiment]]
name = "as it is"
network = "slow"
[[experiment]]
name = "faster"
network = { use = "slow", between = 16e6, within = 0 }
[[experiment]]
name = "inline"
network = { nodes = 4, ranks_per_node = 1, between = 8e6 }
[[experiment]]
name = "none"
"""


def test_keys_of_an_experiment_override_its_named_network(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(MODEL)
    (tmp_path / "s.toml").write_text(TEXT)
    suite = suites.load_suite(tmp_path / "s.toml")
    assert [entry.experiment.network for entry in suite.entries] == [
        EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6, within=20e6),
        EmulatedNetwork(nodes=2, ranks_per_node=2, between=16e6),
        EmulatedNetwork(nodes=4, ranks_per_node=1, between=8e6),
        None,
    ]
    assert {network.node_of(3) for e in suite.entries if (network := e.experiment.network)} == {1, 3}


def test_suite_file_can_define_a_model(tmp_path: Path) -> None:
    """`[models.NAME]` needs no model file, overrides a packaged name, and is checked."""
    text = '[suite]\nname = "s"\n[models.own]\n{}[[experiment]]\nname = "one"\nmodel = "own"\n'
    sizes = "layers = 2\nhidden = 12\nheads = 3\nvocab = 30\nseq = 8\n"
    (tmp_path / "s.toml").write_text(text.format(sizes))
    model = suites.load_suite(tmp_path / "s.toml").entry("one").experiment.model
    assert (model.name, model.hidden, model.seq) == ("own", 12, 8)
    (tmp_path / "s.toml").write_text(text.format(sizes.replace("12", "11")))
    with pytest.raises(ConfigError, match=r"heads = 3 in models\.own|models\.own.*heads"):
        suites.load_suite(tmp_path / "s.toml")
    (tmp_path / "two.toml").write_text(f'[[model]]\nname = "a"\n{sizes}[[model]]\nname = "b"\n{sizes}')
    (tmp_path / "s.toml").write_text(text.format(sizes).replace('model = "own"', 'model = "two.toml:b"'))
    assert suites.load_suite(tmp_path / "s.toml").entry("one").experiment.model.name == "b"
