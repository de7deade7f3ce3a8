"""Tests of the published layouts: printed GPUs, batches, degrees, shapes and software, and their local twins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repro.config import Experiment
from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"


def published(name: str) -> dict[str, Experiment]:
    """Return the experiments of a suite on published systems, which are not `local`."""
    entries = committed.suite(FOLDER / f"{name}.toml").entries
    return {e.experiment.name: e.experiment for e in entries if e.experiment.system != "local"}


YUAN, ZERO_R, TURING = published("yuan"), published("zero_r"), published("turing_nlg")
MEGATRON = published("megatron_2019") | published("megatron_2021") | published("megatron_figures")
MEMORY = published("zero_memory")
STATES = {name: e for name, e in MEMORY.items() if re.search(r"^((7\.5b|128b|1t|2t)-|any-).*-n\d+", name)}
LIMITS = {name: e for name, e in MEMORY.items() if name not in STATES}
ALL_EXPERIMENTS = {**YUAN, **MEGATRON, **ZERO_R, **MEMORY, **TURING}

PRINTED = {
    # GPUs and global batch, as printed.  PRESS 002; MEG1 Tables 1, 2, 7; MEG2 Table 2, Fig. 12, 16, 18.
    "yuan-245b": (2128, 3360),
    **{f"meg1-{size}-mp{mp}": (mp, 8) for size, mp in (("1.2b", 1), ("2.5b", 2), ("4.2b", 4), ("8.3b", 8))},
    **{f"meg1-1.2b-mp{mp}": (mp, 8) for mp in (2, 4, 8)},  # App. D Table 8
    **{f"v1-{size}b{kernels}": (size, 8) for size in (1, 2, 4, 8) for kernels in ("", "-softmax")},  # MEG-V1
    **{f"meg1-{size}b-mp{mp}-dp64": (64 * mp, 512) for size, mp in ((1.2, 1), (2.5, 2), (4.2, 4), (8.3, 8))},
    "meg1-8.3b-mp8-dp64-own-ddp": (512, 512),
    **{f"dec2020-v100-{n}b": (n, 8) for n in (1, 2, 4, 8)},
    **{f"dec2020-a100-{n}b": (n, 16) for n in (1, 2, 4, 8)},
    **{f"dec2020-a100-{size}b-dp128": (128 * size, 2048) for size in (1, 2, 4, 8)},
    "gpt3-1024": (1024, 1536),
    **{f"meg1-8.3b-h{heads}-mp8": (8, 8) for heads in (16, 24)},
    **{f"table2-175b-ptd-{n}": (n, 1536) for n in (384, 768, 1536)},
    **{f"table2-175b-zero3-{n}": (n, 1536) for n in (384, 768, 1536)},
    **{f"table2-530b-ptd-{n}": (n, 2240) for n in (560, 1120, 2240)},
    **{f"table2-530b-zero3-{n}": (n, batch) for n, batch in ((640, 2560), (1120, 2240), (2240, 2240))},
    **{f"fig12-plain-b{batch}": (96, batch) for batch in (12, 24, 36, 48, 60)},
    **{f"fig12-interleaved-b{batch}": (96, batch) for batch in (12, 24, 36, 48, 60)},
    **{f"fig18-unoptimized-b{batch}": (96, batch) for batch in (12, 24, 36, 48, 60)},
    **{f"fig16-mb{mb}-b{batch}": (64, batch) for mb in (1, 2, 4, 8) for batch in (128, 512)},
    # MEG2 Fig. 7 (this project chose the batch), 11, 13, 14, 17 (MEG-SC21).
    **{f"fig7-mb{mb}": (1, 128) for mb in (1, 2, 4, 8, 16)},
    **{f"fig11-pp{p}-b{batch}": (8 * p, batch) for p in (1, 2, 4, 8) for batch in (8, 128)},
    **{f"fig13-pp{p}-b{batch}": (64, batch) for p in (2, 4, 8, 16, 32) for batch in (32, 128)},
    **{f"fig14-pp{p}-b{batch}": (64, batch) for p in (2, 4, 8, 16, 32) for batch in (32, 512)},
    **{f"fig17-recompute-b{batch}": (128, batch) for batch in (8, 32, 256)},
    **{f"fig17-keep-b{batch}": (128, batch) for batch in (1, 2, 4, 8, 16)},
    # ZERO3 Tables 7, 8 and 9.
    **{f"fig6-c{c}-{size}": (400, 400) for c, size in enumerate(("40b", "60b", "50b", "140b", "150b"), 1)},
    **{f"fig7-c{c}-40b": (400, 400) for c in (2, 3, 4, 5)},
    **{f"fig7-c{c}-100b": (400, 800) for c in (4, 5)},
    **{f"fig8-c{c}-60b": (128, 8 * batch) for c, batch in enumerate((2, 4, 8, 32, 32), 1)},
    **{f"fig8-c{c}-170b": (400, 300) for c in (1, 2, 3, 4, 5)},
    # ZERO3 Table 10 (Fig. 4), the release's 100B, DeepSpeed's tutorial.
    **{f"fig4-zero-{size}": (128, batch) for size, batch in (("11b", 512), ("12b", 512), ("13b", 256))},
}
PRINTED |= {"meg1-355m-train": (64, 512), "meg1-8.3b-train": (512, 512)}
PRINTED |= {"fig4-dp-1.16b": (128, 1024), "fig4-dp-1.38b": (128, 128)}
PRINTED |= {"tutorial-1.5b-dp": (8, 8), "tutorial-1.5b-zero1": (8, 8), "tutorial-10b-zero2": (32, 32)}
PRINTED |= {"megatron-mp16": (1024, 512), "zero1-mp4": (256, 512), "zero2-mp4": (256, 512)}  # MSBLOG-TNLG
UNPUBLISHED = {
    # The next size or degree, which must not fit; experiments without a printed batch; the map around the layout of
    # Yuan 1.0; the communication volume without recomputation, as in a formula.
    *(f"fig6-{case}" for case in ("c1-50b", "c2-80b", "c2-100b", "c2-120b", "c3-60b", "c4-150b", "c5-170b")),
    *("release-80b", "release-100b", "release-120b", "fig7-c3-100b", "activations-1.5b"),
    *("activations-1.5b-checkpoints", "volume-145.6b", "volume-145.6b-scatter"),
    *("fig4-dp-1.16b-batch1", "fig4-dp-1.4b-batch1", "fig4-dp-1.5b-batch1", "fig4-dp-2.5b-batch1"),
    *("fig4-zero-11b-batch2", "fig4-zero-12b-batch2", "fig4-zero-20b"),
    *("gpt3-1024-unfused", "table1-529.6b-unfused"),
    *(f"megatron-mp{degree}" for degree in (1, 2, 4, 8)),
    *(f"zero1-mp{degree}" for degree in (1, 2, 8, 16)),
    *("zero1-mp4-batch12", "zero1-128gpus", "megatron-512gpus", "megatron-256gpus"),
    *("megatron-mp16-batch16", "megatron-mp16-batch20"),
    *("zero2-mp4-batch18", "zero2-mp4-batch18-no-md", "fig8-c5-150b", "docs-200b-c4", "docs-200b-c5"),
    *("batch-c3-60b-8", "batch-c3-60b-16", "batch-c4-60b-64", "batch-c4-60b-128"),
    *(name for name in YUAN if name.startswith(("map-", "rule-"))),
}


def table1() -> dict[str, tuple[object, ...]]:
    """Return the lines of MEG2 Table 1 in the ledger, by experiment name."""
    lines = {}
    for row in committed.ledger().claim("meg2-table1-weak-scaling").rows:
        line = row.label.partition(":")[0].lower().replace("1008b", "1t")
        keys = ("heads", "hidden", "layers", "tp", "pp", "gpus", "batch")
        lines[f"table1-{line}"] = tuple(row.variables[key] for key in keys)
    return lines


def test_experiments_have_the_printed_gpus_batches_shapes_and_degrees() -> None:
    def shape(e: Experiment) -> tuple[int, ...]:
        return (e.model.heads, e.model.hidden, e.model.layers, e.layout.tp, e.layout.pp)

    found = {name: (e.layout.world, e.layout.global_batch) for name, e in ALL_EXPERIMENTS.items()}
    assert {name: found[name] for name in PRINTED} == PRINTED
    assert {name: shape(MEGATRON[name]) + found[name] for name in table1()} == table1()


def test_every_published_experiment_is_checked() -> None:
    """ZERO3 Table 2 has Nd = 64 in every line. The names of the other experiments contain GPUs and stage."""
    degrees = {name: re.match(r"(?:d?dp|posg?)-mp(\d+)-", name) for name in LIMITS}
    table2 = {name: 64 * int(found[1]) for name, found in degrees.items() if found}
    assert {name: LIMITS[name].layout.world for name in table2} == table2
    for name, experiment in STATES.items():
        assert experiment.layout.dp == int(name.partition("-n")[2].partition("-")[0])
        assert f"-z{experiment.layout.zero}-" in name
    assert {*ALL_EXPERIMENTS} == {*PRINTED, *table1(), *table2, *STATES, *UNPUBLISHED}
    retained = r"volume-145.6b(-scatter)?|activations-1.5b|tutorial-1.5b-(dp|zero1)|fig17-keep-.*"
    for name, experiment in ALL_EXPERIMENTS.items():
        is_recomputed = not re.fullmatch(retained, name)
        assert (experiment.layout.precision, experiment.layout.recompute) == ("fp16", is_recomputed), name


def test_zero_layouts_have_the_bucket_size_of_the_release() -> None:
    """A layout with ZeRO and C_B has buckets of 500,000,000 fp16 elements; the baselines have no C_B."""
    for name, experiment in {**ZERO_R, **LIMITS, **TURING}.items():
        layout = experiment.layout
        if layout.zero:
            assert (layout.cb, layout.bucket_bytes) == (True, 1_000_000_000), name
        elif not name.startswith("activations"):
            assert not layout.cb, name


def test_ddp_bucket_copies_are_only_in_ddp_layouts() -> None:
    """ZERO3 sec. 10.1 uses torch's DDP without model parallelism; `ddp-mp*` combines both."""
    for name, experiment in {**LIMITS, **published("zero_throughput")}.items():
        layout = experiment.layout
        baseline = layout.zero == 0 and layout.dp >= 64 and layout.tp == 1
        assert layout.gradient_as_bucket_view is not (baseline or name.startswith("ddp-")), name
    for name, experiment in published("megatron_2019").items():
        # Megatron-LM of 2019 had two kinds of DDP; only torch's overlaps communication (MEG-README a0368ddf).
        layout = experiment.layout
        if layout.dp > 1 and layout.kernels == "unfused":
            assert layout.gradient_as_bucket_view is not layout.overlap, name


def lines(claim: str, column: str) -> list[tuple[dict[str, float], str, int]]:
    """Return the numbers, the label and the printed value of `column` for each line of a claim's table."""
    found = []
    for row in committed.ledger().claim(claim).rows:
        if row.label.endswith(f": {column}") and row.printed is not None:
            numbers = {key: value for key, value in row.variables.items() if isinstance(value, int)}
            found.append((numbers, row.label.partition(":")[0], int(row.printed.value)))
    return found


def test_throughput_experiments_have_the_printed_layouts_and_shapes() -> None:
    """The sources are ZERO3 Tables 5, 6 and 10 and the 64-GPU table of the DeepSpeed release."""
    zero = published("zero_throughput") | published("zero_superlinear")
    release = published("deepspeed_64gpu")
    words = {"ZeRO": "zero", "Baseline": "megatron", "DDP": "ddp", "Megatron": "megatron"}
    checked = 0
    for claim, suite, name, column in (
        ("zero-table5-fig2-configs", zero, "fig2-{size}-{system}", "total batch"),
        ("zero-table6-fig3-superlinear", zero, "fig3-{size}", "total batch"),
        ("zero-table10-fig4-dp-only", zero, "fig4-{size}-{system}", "total batch"),
        ("ds-64gpu-table", release, "64gpu-{size}-{system}", "batch"),
    ):
        for numbers, label, total in lines(claim, column):
            size, system = (*label.split(" "), "")[:2]
            experiment = suite[name.format(size=size.lower(), system=words.get(system, system.lower()))]
            model, layout = experiment.model, experiment.layout
            assert layout.global_batch == total
            assert layout.micro_batch == numbers.get("batch", numbers.get("replica"))
            assert layout.tp == numbers.get("mp", layout.tp)
            assert layout.world == numbers.get("gpus", layout.world)
            shape = {key: getattr(model, key) for key in ("layers", "hidden", "heads")}
            assert {key: numbers.get(key, value) for key, value in shape.items()} == shape
            checked += 1
    assert checked == 18 + 4 + 11 + 8


def test_predicted_experiments_have_the_kernels_of_their_software() -> None:
    for name in (
        *("zero_throughput", "zero_superlinear", "deepspeed_lowbw", "deepspeed_64gpu"),
        *("deepspeed_dgx2", "turing_nlg"),
    ):
        for experiment in published(name).values():
            assert experiment.layout.kernels == "unfused", experiment.name
            assert experiment.training.dropout == experiment.training.attention_dropout == 0.1
    for name, experiment in {**MEGATRON, **YUAN}.items():
        if not name.startswith("volume"):
            is_first = name.startswith(("meg1", "v1")) and not name.endswith("softmax")
            old = is_first or name.endswith("unfused")
            assert experiment.layout.kernels == ("unfused" if old else "softmax"), name
            assert experiment.training.dropout == 0.1


def test_yuan_has_the_published_pipeline() -> None:
    layout = YUAN["yuan-245b"].layout
    claim = committed.ledger().claim("yuan-config")
    rows = {row.label: row.printed.value for row in claim.rows if row.printed}
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch) == (8, 38, 7, 1)
    assert layout.accumulation == rows["micro-batches per pipeline"] == 480
    assert {len(part) for part in layout.parts(76)} == {2} == {rows["layers per stage"]}


def test_c1_to_c5_have_options_of_zero_table_3() -> None:
    """The columns are the ZeRO stage, C_B, M_D, P_a and P_a+cpu."""
    options = {"1": (1, True, True, False, False), "2": (1, True, True, True, False)}
    options |= {"3": (2, True, True, False, False), "4": (2, True, True, True, False)}
    options |= {"5": (2, True, True, True, True)}
    seen = {}
    for entry in committed.suite(FOLDER / "zero_r.toml").entries:
        name, layout = entry.experiment.name, entry.experiment.layout
        if match := re.search(r"-c(\d)", name):
            seen[match[1]] = (layout.zero, layout.cb, layout.md, layout.pa, layout.pa_cpu)
            assert seen[match[1]] == options[match[1]], name
    assert seen == options


FAMILIES = sorted(
    path.stem
    for path in FOLDER.glob("*.toml")
    # Twins of `slow_links` and twins on emulated networks are in separate suites.
    if path.stem not in ("smoke", "machine", "engines", "slow_links", "convergence", "again", "gpu_day")
    and not path.stem.startswith("windtunnel_")
)
"""Suites of published experiments; the other suites run locally, and `again` is only simulated."""


@pytest.mark.parametrize("suite", FAMILIES)
def test_every_published_suite_has_local_twins(suite: str) -> None:
    """Twins have at most 8 ranks, a timeout of 10 minutes, and a comparison if the published experiments have one.

    Two published experiments do not fit on a device together, so each round of a comparison runs them separately.
    """
    loaded = committed.suite(FOLDER / f"{suite}.toml")
    twins = {e.experiment.name: e.experiment for e in loaded.entries if e.experiment.system == "local"}
    assert twins
    assert published(suite)
    for name, twin in twins.items():
        assert name.startswith("twin-")
        assert twin.layout.world <= 8
        assert (twin.limits.timeout_s <= 600, twin.limits.hang_s <= 120) == (True, True), name
    compared = {entry.baseline in twins for entry in loaded.comparisons}
    assert compared in (set(), {True, False})
    assert all(one.apart and one.rounds >= 3 for one in loaded.comparisons)
