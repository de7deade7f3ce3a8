"""Tests of the tables that a suite names: layouts, emulated networks and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.config import EmulatedNetwork, Layout, suites
from repro.config.errors import ConfigError
from tests.launch.runs import MODEL

TEXT = """
suite.name = "s"
defaults = { model = "tiny.toml", layout = { precision = "bf16", micro_batch = 2, zero = 0 } }
layouts.C1 = { zero = 1, tp = 2 }
layouts.C4 = { zero = 2, tp = 2, pa = true, recompute = true }
"""


def layouts(folder: Path, text: str, head: str = TEXT) -> list[Layout]:
    (folder / "tiny.toml").write_text(MODEL)
    (folder / "s.toml").write_text(head + text)
    return [entry.experiment.layout for entry in suites.load_suite(folder / "s.toml").entries]


C1, C4 = {"zero": 1, "tp": 2}, {"zero": 2, "tp": 2, "pa": True, "recompute": True}


def test_named_layout_overrides_defaults_and_keys_override_it(tmp_path: Path) -> None:
    names = '[[experiment]]\nname = "plain"\n[[experiment]]\nname = "C1"\nlayout = "C1"\n'
    more = '[[experiment]]\nname = "C4 on four"\nlayout = { use = "C4", dp = 2, zero = 1 }'
    plain = Layout(precision="bf16", micro_batch=2)
    assert layouts(tmp_path, names + more) == [
        plain,
        replace(plain, **C1),
        replace(plain, **C4 | {"dp": 2, "zero": 1}, global_batch=4),
    ]
    defaults = TEXT.replace("zero = 0", 'use = "C4"')
    assert layouts(tmp_path, names, defaults) == [replace(plain, **C4), replace(plain, **C1)]
    (layout,) = layouts(tmp_path, '[[experiment]]\nname = "a"\nlayout = { use = "C1", pp = 2, world = 4 }')
    assert layout.world == 4


NETWORKS = """
suite.name = "s"
defaults = { model = "tiny.toml", layout.dp = 4 }
networks.slow = { nodes = 2, ranks_per_node = 2, between = 8e6, within = 20e6 }
experiment = [
    { name = "as it is", network = "slow" },
    { name = "faster", network = { use = "slow", between = 16e6, within = 0 } },
    { name = "inline", network = { nodes = 4, ranks_per_node = 1, between = 8e6 } },
    { name = "none" },
]
"""


def test_keys_of_an_experiment_override_its_named_network(tmp_path: Path) -> None:
    """The suite file may start with a byte-order mark."""
    layouts(tmp_path, NETWORKS, "\ufeff")
    found = [entry.experiment.network for entry in suites.load_suite(tmp_path / "s.toml").entries]
    assert found == [
        EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6, within=20e6),
        EmulatedNetwork(nodes=2, ranks_per_node=2, between=16e6),
        EmulatedNetwork(nodes=4, ranks_per_node=1, between=8e6),
        None,
    ]
    assert {network.node_of(3) for network in found if network} == {1, 3}


def test_suite_file_can_define_a_model(tmp_path: Path) -> None:
    """`[models.NAME]` needs no model file, overrides a packaged name, and is checked."""
    text = '[suite]\nname = "s"\n[models.own]\n{}[[experiment]]\nname = "one"\nmodel = "own"\n'
    sizes = "layers = 2\nhidden = 12\nheads = 3\nvocab = 30\nseq = 8\n"
    path = tmp_path / "s.toml"
    path.write_text(text.format(sizes))
    model = suites.load_suite(path).entry("one").experiment.model
    assert (model.name, model.hidden, model.seq) == ("own", 12, 8)
    path.write_text(text.format(sizes.replace("12", "11")))
    with pytest.raises(ConfigError, match=r"heads = 3 in models\.own|models\.own.*heads"):
        suites.load_suite(path)
    (tmp_path / "two.toml").write_text(f'[[model]]\nname = "a"\n{sizes}[[model]]\nname = "b"\n{sizes}')
    path.write_text(text.format(sizes).replace('model = "own"', 'model = "two.toml:b"'))
    assert suites.load_suite(path).entry("one").experiment.model.name == "b"
