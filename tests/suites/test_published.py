"""The published layouts: as many GPUs and samples as the sources print, and the shapes that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro import suites
from repro.claims.ledger import load as load_ledger
from repro.claims.published import read
from repro.config import Experiment

FOLDER = Path(__file__).parents[2] / "suites"


def published(name: str) -> dict[str, Experiment]:
    """The experiments of a suite that are not for the machine at hand."""
    entries = suites.load(FOLDER / f"{name}.toml").entries
    return {e.experiment.name: e.experiment for e in entries if e.experiment.system != "local"}


YUAN, MEGATRON, ZERO_R = published("yuan"), published("megatron"), published("zero_r")

PRINTED = {
    # GPUs and global batch, as printed.  PRESS 002; MEG1 Tables 1, 2, 7; MEG2 Table 2, Fig. 12, 16, 18.
    "yuan-245b": (2128, 3360),
    **{f"meg1-{size}-mp{mp}": (mp, 8) for size, mp in (("1.2b", 1), ("2.5b", 2), ("4.2b", 4), ("8.3b", 8))},
    "meg1-1.2b-mp1-dp64": (64, 512),
    "meg1-2.5b-mp2-dp64": (128, 512),
    "meg1-4.2b-mp4-dp64": (256, 512),
    "meg1-8.3b-mp8-dp64": (512, 512),
    "meg1-8.3b-h16-mp8": (8, 8),
    "meg1-8.3b-h24-mp8": (8, 8),
    "meg1-355m-train": (64, 512),
    "meg1-8.3b-train": (512, 512),
    **{f"table2-175b-ptd-{n}": (n, 1536) for n in (384, 768, 1536)},
    **{f"table2-175b-zero3-{n}": (n, 1536) for n in (384, 768, 1536)},
    **{f"table2-530b-ptd-{n}": (n, 2240) for n in (560, 1120, 2240)},
    "table2-530b-zero3-640": (640, 2560),
    "table2-530b-zero3-1120": (1120, 2240),
    "table2-530b-zero3-2240": (2240, 2240),
    **{
        f"{name}-b{batch}": (96, batch)
        for name in ("fig12-plain", "fig12-interleaved", "fig18-unoptimized")
        for batch in (12, 24, 36, 48, 60)
    },
    **{f"fig16-mb{mb}-b{batch}": (64, batch) for mb in (1, 2, 4, 8) for batch in (128, 512)},
    # ZERO3 Tables 7, 8 and 9.
    **{f"fig6-c{c}-{size}": (400, 400) for c, size in enumerate(("40b", "60b", "50b", "140b", "150b"), 1)},
    **{f"fig7-c{c}-40b": (400, 400) for c in (2, 3, 4, 5)},
    **{f"fig7-c{c}-100b": (400, 800) for c in (4, 5)},
    **{f"fig8-c{c}-60b": (128, 8 * batch) for c, batch in enumerate((2, 4, 8, 32, 32), 1)},
    **{f"fig8-c{c}-170b": (400, 300) for c in (1, 2, 3, 4, 5)},
}


def table1() -> dict[str, dict[str, int]]:
    """The lines of MEG2 Table 1 as the ledger has them, by the name of the experiment."""
    lines = {}
    for row in load_ledger().claim("meg2-table1-weak-scaling").rows:
        line = row.label.partition(":")[0].lower().replace("1008b", "1t")
        numbers = {key: value for key, value in row.variables.items() if isinstance(value, int)}
        lines[f"table1-{line}"] = numbers
    return lines


@pytest.mark.parametrize("name", PRINTED)
def test_worlds_and_batches_are_the_printed_ones(name: str) -> None:
    layout = {**YUAN, **MEGATRON, **ZERO_R}[name].layout
    assert (layout.world, layout.global_batch) == PRINTED[name]


@pytest.mark.parametrize("name", table1())
def test_weak_scaling_to_a_trillion(name: str) -> None:
    line, experiment = table1()[name], MEGATRON[name]
    model, layout = experiment.model, experiment.layout
    assert (model.heads, model.hidden, model.layers) == (line["heads"], line["hidden"], line["layers"])
    assert (layout.tp, layout.pp, layout.world) == (line["tp"], line["pp"], line["gpus"])
    assert layout.global_batch == line["batch"]


def test_nothing_is_left_unchecked() -> None:
    assert {*YUAN, *MEGATRON, *ZERO_R} == {*PRINTED, *table1()}
    for experiment in (*YUAN.values(), *MEGATRON.values(), *ZERO_R.values()):
        assert (experiment.layout.precision, experiment.layout.recompute) == ("fp16", True)


def test_yuans_pipeline() -> None:
    layout = YUAN["yuan-245b"].layout
    rows = {row.label: read(row.published).value for row in load_ledger().claim("yuan-config").rows}
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch) == (8, 38, 7, 1)
    assert layout.accumulation == rows["micro-batches per pipeline"] == 480
    assert {len(part) for part in layout.parts(76)} == {2} == {rows["layers per stage"]}


def test_c1_to_c5_are_the_papers_table_3() -> None:
    """ZERO3 Table 3: the stage, and C_B, M_D, P_a, P_a+cpu."""
    switches = {
        "1": (1, True, True, False, False),
        "2": (1, True, True, True, False),
        "3": (2, True, True, False, False),
        "4": (2, True, True, True, False),
        "5": (2, True, True, True, True),
    }
    for entry in suites.load(FOLDER / "zero_r.toml").entries:
        name, layout = entry.experiment.name, entry.experiment.layout
        if match := re.search(r"-c(\d)", name):
            found = (layout.zero, layout.cb, layout.md, layout.pa, layout.pa_cpu)
            assert found == switches[match[1]], name


@pytest.mark.parametrize("suite", ["yuan", "megatron", "zero_r"])
def test_twins_fit_one_machine(suite: str) -> None:
    entries = suites.load(FOLDER / f"{suite}.toml").entries
    twins = [e.experiment for e in entries if e.experiment.system == "local"]
    assert twins
    assert all(twin.name.startswith("twin-") and twin.layout.world <= 8 for twin in twins)
    assert {"megatron": 8, "yuan": 8, "zero_r": 4}[suite] == max(twin.layout.world for twin in twins)
