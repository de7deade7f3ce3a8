"""Tests of the suite of loss curves: equal training under every layout, controls, faults, and the accepted distance."""

from __future__ import annotations

from pathlib import Path

from scipy.stats import t

from repro.claims.expression import arguments
from repro.claims.judge import experiments_read
from repro.results.metrics import LOSS_STRETCH_STEPS
from tests import committed

SUITE = committed.suite(Path(__file__).parents[3] / "suites" / "convergence.toml")
EXPERIMENTS = {entry.experiment.name: entry.experiment for entry in SUITE.entries}
REFERENCE = EXPERIMENTS["fp32"]
CONTROLS = {name for name in EXPERIMENTS if name.startswith("order-")}
FAULTS = {name for name in EXPERIMENTS if name.startswith("fault-")}
LAYOUTS = {name: e for name, e in EXPERIMENTS.items() if e.layout.world > 1 and e.layout.precision == "fp32"}
CLAIM = committed.ledger().claim("repro-convergence")


def rows(bound: str) -> dict[str, list[str]]:
    """Return the reference and the controls of each row of the claim, by experiment."""
    found = {}
    for row in CLAIM.rows:
        if row.bound == bound:
            (called,) = arguments(row.evidence[0].value, row.variables)
            name, *others = (text.removeprefix("convergence/") for text in called[1])
            found[name] = others
    return found


def test_every_layout_has_the_same_training_and_a_row() -> None:
    courses = {str({**e.course, "engine": "any"}) for e in (REFERENCE, *LAYOUTS.values())}
    assert len(courses) == 1
    assert rows("at most").keys() == LAYOUTS.keys()
    assert REFERENCE.training.steps >= 500
    assert REFERENCE.training.data == "shakespeare"


def test_controls_differ_from_the_reference_only_in_summation_order() -> None:
    for control in map(EXPERIMENTS.__getitem__, CONTROLS):
        assert (control.course, control.layout.world) == (REFERENCE.course, 1)
        assert control.key != REFERENCE.key
    for comparisons in (rows("at most"), rows("over")):
        assert all(others[0] == "fp32" and set(others[1:]) == CONTROLS for others in comparisons.values())


def test_every_fault_changes_one_setting_and_has_a_row() -> None:
    assert rows("over").keys() == FAULTS
    for name in FAULTS:
        training, reference = EXPERIMENTS[name].course["training"], REFERENCE.course["training"]
        keys = {*training, *reference}
        assert sum(training.get(key) != reference.get(key) for key in keys) == 1
        assert EXPERIMENTS[name].layout == REFERENCE.layout


def test_bound_follows_from_students_t_over_all_loss_stretches() -> None:
    """A correct curve exceeds the bound in fewer than 5 % of ledgers, and in more with a bound that is 0.1 lower."""
    (printed,) = {row.printed.value for row in CLAIM.rows if row.printed is not None}
    stretches = len(LAYOUTS) * REFERENCE.training.steps // LOSS_STRETCH_STEPS
    false_alarms, more = (2 * stretches * t.sf(bound, len(CONTROLS)) for bound in (printed, printed - 0.1))
    assert false_alarms < 0.05 < more


def test_16_bit_trainings_differ_from_fp32_only_in_precision() -> None:
    expected = {**REFERENCE.course, "precision": ""}
    for row in committed.ledger().claim("repro-precision").rows:
        experiment = EXPERIMENTS[str(row.variables["experiment"]).removeprefix("convergence/")]
        assert {**experiment.course, "precision": ""} == expected


def test_claim_of_the_release_compares_zero_1_with_0() -> None:
    """ZeRO 1 of the release in fp16 is compared with the same layout without ZeRO, or with one process."""
    for row in committed.ledger().claim("ds-same-loss").rows:
        if row.evidence:
            pair = experiments_read(row.evidence[0].value, row.variables)
            layouts = [EXPERIMENTS[name.removeprefix("convergence/")].layout for name in pair]
            assert {(layout.zero, layout.precision) for layout in layouts} == {(0, "fp16"), (1, "fp16")}
            assert len({(layout.dp, layout.tp) for layout in layouts}) == 1


def test_learning_rate_schedule_is_turing_nlg_scaled_by_600() -> None:
    rows = committed.ledger().claim("tnlg-training-recipe").rows
    printed = {row.label: row.printed.value for row in rows if row.printed}
    training = REFERENCE.training
    assert printed["iterations"] / training.steps == 600
    assert training.warmup_steps == round(printed["warm-up"] / 600)
    assert training.decay_steps == round(printed["cosine over"] / 600)
