"""The suite of long trainings: the published recipes, and twins that are stopped and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import suites
from repro.claims.reader import load as load_ledger

SUITE = suites.load(Path(__file__).parents[2] / "suites" / "quality.toml")
EXPERIMENTS = {entry.experiment.name: entry.experiment for entry in SUITE.entries}
MEGATRON = {"355M": "quality-355m", "2.5B": "quality-2.5b", "8.3B": "quality-8.3b"}
TURING = "quality-turing-nlg-17b"


def test_every_experiment_writes_checkpoints() -> None:
    assert all(experiment.training.checkpoint_every for experiment in EXPERIMENTS.values())


@pytest.mark.parametrize("label", MEGATRON)
def test_megatrons_sizes_and_gpus_are_those_of_table_2(label: str) -> None:
    line = next(
        row.variables
        for row in load_ledger().claim("meg1-table2-training").rows
        if row.label == f"{label}: days per epoch"
    )
    experiment = EXPERIMENTS[MEGATRON[label]]
    model, layout = experiment.model, experiment.layout
    assert (model.layers, model.hidden, model.heads) == tuple(line[k] for k in ("layers", "hidden", "heads"))
    assert (layout.world, layout.dp, layout.global_batch) == (line["gpus"], 64, 512)


@pytest.mark.parametrize("name", [*MEGATRON.values(), TURING])
def test_recipes_are_the_printed_ones(name: str) -> None:
    """MEG1 sec. 4.2, as the claim's conditions have it; Turing-NLG's own where somebody printed them."""
    experiment = EXPERIMENTS[name]
    training = experiment.training
    assert (experiment.seq, experiment.layout.global_batch, experiment.layout.precision) == (
        1024,
        512,
        "fp16",
    )
    assert (training.lr, training.steps, training.schedule) == (1.5e-4, 300_000, "cosine")
    wanted = (3200, 500_000) if name == TURING else (3000, 0)
    assert (training.warmup_steps, training.decay_steps) == wanted


def test_published_quality_is_not_comparable_or_says_what_it_needs() -> None:
    """GPT-2's numbers and the counts of the test set can be had by whoever has the files; no other weights exist."""
    ledger = load_ledger()
    rows = [row for name in SUITE.claims if name != "repro-resume" for row in ledger.claim(name).rows]
    assert all(bool(row.not_comparable) != bool(row.needs) for row in rows)
    assert all(row.not_comparable for row in rows if row.metric != "exact" and "GPT-2" not in row.label)


def test_twins_train_the_same_and_go_on_under_three_layouts() -> None:
    twins = {
        name: e
        for name, e in EXPERIMENTS.items()
        if e.system == "local" and not name.startswith("twin-recipe-")
    }
    assert len({str(twin.course) for twin in twins.values()}) == 1
    half = twins["twin-half-zero2-dp2"]
    then = [twin for twin in twins.values() if twin.training.continues]
    assert {twin.training.continues for twin in then} == {half.name}
    assert {(twin.layout.dp, twin.layout.tp, twin.layout.pp) for twin in then} == {
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
    }
    assert {twin.training.steps for twin in twins.values() if twin != half} == {2 * half.training.steps}
    rows = load_ledger().claim("repro-resume").rows
    compared = {f"quality/{name}" for name in twins} - {"quality/twin-whole", f"quality/{half.name}"}
    assert {row.variables["experiment"] for row in rows} == compared
