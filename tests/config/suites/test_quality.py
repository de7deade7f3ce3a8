"""Tests of the suite of long trainings: published recipes, dry runs, and twins that continue from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims.formulas import gpt_params
from repro.launch.run import preview_run
from repro.results.schema import MEASURED, SIMULATED
from repro.results.store import Store
from tests import committed
from tests.records import made_up

SUITE_FOLDER = Path(__file__).parents[3] / "suites"
SUITE = committed.suite(SUITE_FOLDER / "quality.toml")
EXPERIMENTS = {entry.experiment.name: entry.experiment for entry in SUITE.entries}
MEGATRON = {"355M": "quality-355m", "2.5B": "quality-2.5b", "8.3B": "quality-8.3b"}
TURING, YUAN = "quality-turing-nlg-17b", "quality-yuan-245b"


def test_megatron_experiments_have_the_shapes_of_table_2() -> None:
    rows = {row.label: row.variables for row in committed.ledger().claim("meg1-table2-training").rows}
    for label, name in MEGATRON.items():
        model, layout, line = (
            EXPERIMENTS[name].model,
            EXPERIMENTS[name].layout,
            rows[f"{label}: days per epoch"],
        )
        assert {key: getattr(model, key) for key in ("layers", "hidden", "heads")}.items() <= line.items()
        assert (layout.world, layout.dp, layout.global_batch) == (line["gpus"], 64, 512)


SETTINGS = {"learning rate": "lr", "smallest learning rate": "min_lr", "warm-up": "warmup_steps"}
SETTINGS |= {"iterations": "steps", "cosine over": "decay_steps", "batch": "global_batch", "sequence": "seq"}
SETTINGS |= {"weight decay": "weight_decay", "gradient clipping": "clip", "dropout": "dropout"}
SETTINGS |= {"Adam's beta 1": "beta1", "Adam's beta 2": "beta2"}
"""Setting of an experiment by the label of its published number."""
RECIPES = [
    *((name, "meg1-training-recipe") for name in MEGATRON.values()),
    (TURING, "tnlg-training-recipe"),
    (YUAN, "yuan-training-recipe"),
]


def printed(claim: str) -> dict[str, float]:
    """Return the numbers of a recipe by their label in the ledger, without the prefix `13B: `."""
    return {
        row.label.removeprefix("13B: "): row.printed.value if row.printed else float(row.published)  # 1e-5
        for row in committed.ledger().claim(claim).rows
    }


@pytest.mark.parametrize(("name", "claim"), RECIPES)
def test_recipe_has_the_published_numbers(name: str, claim: str) -> None:
    experiment, numbers = EXPERIMENTS[name], printed(claim)
    if name == TURING:  # Turing-NLG uses the recipe of Megatron-LM except for its published numbers
        numbers = {**printed("meg1-training-recipe"), **numbers}
        del numbers["smallest learning rate"]
    samples = {label: numbers.pop(label) for label in tuple(numbers) if label.startswith("samples")}
    settings = {**vars(experiment.training), **vars(experiment.layout), "seq": experiment.seq}
    found = {label: settings[SETTINGS[label]] for label in numbers}
    assert found == pytest.approx(numbers, rel=1e-12)
    if samples:
        steps_per_sample = experiment.training.steps / samples["samples"]
        assert experiment.training.warmup_steps == round(steps_per_sample * samples["samples of warm-up"])
        assert experiment.training.decay_steps == round(steps_per_sample * samples["samples of the cosine"])
    assert experiment.training.schedule == "cosine"
    assert experiment.layout.precision == "fp16"
    assert experiment.training.attention_dropout == experiment.training.dropout


def test_every_quality_experiment_has_a_recipe_and_writes_checkpoints() -> None:
    assert {name for name, _ in RECIPES} == {name for name in EXPERIMENTS if name.startswith("quality-")}
    assert all(experiment.training.checkpoint_every for experiment in EXPERIMENTS.values())
    yuan = committed.suite(SUITE_FOLDER / "yuan.toml").entry("yuan-245b").experiment
    assert EXPERIMENTS[YUAN].layout == yuan.layout, "the predicted throughput is that of this layout"


def memory(suite: str, only: str, results: Path) -> dict[str, str]:
    """Return the memory that a dry run shows for each experiment."""
    rows = preview_run([SUITE_FOLDER / f"{suite}.toml"], [only], results, False, MEASURED, "")
    return {row.name: row.memory for row in rows}


def test_dry_run_shows_model_states_and_device_memory(tmp_path: Path) -> None:
    """Model states have 16 bytes per parameter of a rank, or 4 + 12/64 with ZeRO 1 over 64 ranks."""
    found = memory("quality", "quality-*", tmp_path)
    width, stage = 16384, 2 * 12 * 16384**2
    expected = {
        "quality-355m": 16 * gpt_params(24, 1024),
        "quality-2.5b": 16 * gpt_params(54, 1920) / 2,
        "quality-8.3b": 16 * gpt_params(72, 3072) / 8,
        TURING: (4 + 12 / 64) * gpt_params(78, 4256) / 4,
        YUAN: 16 * ((stage + 53248 * width) / 8 + 2048 * width),
    }
    gigabytes = {name: float(message.split()[1]) for name, message in found.items()}
    assert gigabytes == pytest.approx({name: size / 1e9 for name, size in expected.items()}, rel=0.01)
    assert found["quality-8.3b"].endswith("of 32.3 GB")  # 32 GB of a V100 minus its context
    assert found[YUAN].endswith("of device memory whose size is not published")


def test_dry_run_shows_the_memory_of_a_simulation(tmp_path: Path) -> None:
    name = "megatron-mp4"
    assert memory("turing_nlg", name, tmp_path)[name].endswith("GB of 32.7 GB: does not fit")
    entry = committed.suite(SUITE_FOLDER / "turing_nlg.toml").entry(name)
    keys = {"suite": "turing_nlg", "key": entry.experiment.key, "evidence": SIMULATED}
    metrics = {"memory.peak_bytes": 20e9, "memory.reserved_bytes": 21e9}
    with Store(tmp_path) as store:
        store.append(made_up(name, **keys, metrics=metrics))
    assert memory("turing_nlg", name, tmp_path) == {name: "21 GB of 32.7 GB, simulated: fits"}


def test_quality_rows_are_not_comparable_or_name_their_needs() -> None:
    """Only the weights of GPT-2 and the test set are available, so other rows of quality are not comparable."""
    ledger = committed.ledger()
    rows = [row for name in SUITE.claims if name != "repro-resume" for row in ledger.claim(name).rows]
    assert all(bool(row.not_comparable) != bool(row.needs) for row in rows)
    assert all(row.not_comparable for row in rows if row.metric != "exact" and "GPT-2" not in row.label)


def test_twins_continue_a_checkpoint_with_three_layouts() -> None:
    twins = {n: e for n, e in EXPERIMENTS.items() if n.startswith("twin-") and "-recipe-" not in n}
    assert {e.system for e in twins.values()} == {"local"}
    assert len({str(twin.course) for twin in twins.values()}) == 1
    half = twins["twin-half-zero2-dp2"]
    continued = [twin for twin in twins.values() if twin.training.continues]
    assert {twin.training.continues for twin in continued} == {half.name}
    degrees = {(twin.layout.dp, twin.layout.tp, twin.layout.pp) for twin in continued}
    assert degrees == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {twin.training.steps for twin in twins.values() if twin != half} == {2 * half.training.steps}
    rows = committed.ledger().claim("repro-resume").rows
    compared = {f"quality/{name}" for name in twins} - {"quality/twin-whole", f"quality/{half.name}"}
    assert {row.variables["experiment"] for row in rows} == compared
