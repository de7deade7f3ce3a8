"""The suite of loss curves: one training under every layout, and the bound that the ledger holds them to."""

from __future__ import annotations

import math
from pathlib import Path

from repro.claims.expression import arguments
from repro.claims.judge import experiments_read
from repro.claims.reader import load_ledger
from repro.results.metrics import LOSS_STRETCH_STEPS
from tests import committed

SUITE = committed.suite(Path(__file__).parents[3] / "suites" / "convergence.toml")
EXPERIMENTS = {entry.experiment.name: entry.experiment for entry in SUITE.entries}
REFERENCE = EXPERIMENTS["fp32"]
CONTROLS = {name for name in EXPERIMENTS if name.startswith("order-")}
FAULTS = {name for name in EXPERIMENTS if name.startswith("fault-")}
LAYOUTS = {name: e for name, e in EXPERIMENTS.items() if e.layout.world > 1 and e.layout.precision == "fp32"}
CLAIM = load_ledger().claim("repro-convergence")


def rows(bound: str) -> dict[str, list[str]]:
    """What each row of the claim is held against, by its experiment."""
    found = {}
    for row in CLAIM.rows:
        if row.bound == bound:
            (called,) = arguments(row.evidence[0].value, row.variables)
            name, *others = (text.removeprefix("convergence/") for text in called[1])
            found[name] = others
    return found


def test_every_layout_trains_the_same_and_is_a_row() -> None:
    courses = {str({**e.course, "engine": "any"}) for e in (REFERENCE, *LAYOUTS.values())}
    assert len(courses) == 1
    assert rows("at most").keys() == LAYOUTS.keys()
    assert REFERENCE.training.steps >= 500
    assert REFERENCE.training.data == "shakespeare"


def test_controls_are_one_process_in_another_order_and_nothing_else() -> None:
    for name in CONTROLS:
        control = EXPERIMENTS[name]
        assert control.course == REFERENCE.course
        assert control.layout.world == 1
        assert control.key != REFERENCE.key
    for held in (rows("at most"), rows("over")):
        assert all(others[0] == "fp32" and set(others[1:]) == CONTROLS for others in held.values())


def test_faults_differ_in_one_setting_and_must_be_noticed() -> None:
    assert rows("over").keys() == FAULTS
    for name in FAULTS:
        training, right = EXPERIMENTS[name].course["training"], REFERENCE.course["training"]
        keys = {*training, *right}
        assert sum(training.get(key) != right.get(key) for key in keys) == 1
        assert EXPERIMENTS[name].layout == REFERENCE.layout


def test_the_bound_is_students_t_over_all_stretches_of_all_curves() -> None:
    """Five in a hundred ledgers would hold a curve that strays further by chance, and more with a bound 0.1 lower."""
    (printed,) = {row.printed.value for row in CLAIM.rows if row.printed is not None}
    stretches = len(LAYOUTS) * REFERENCE.training.steps // LOSS_STRETCH_STEPS

    def by_chance(bound: float) -> float:
        return stretches * beyond(bound, len(CONTROLS))

    assert by_chance(printed) < 0.05 < by_chance(printed - 0.1)


def beyond(bound: float, degrees: int, steps: int = 20_000) -> float:
    """Chance that |Student's t| exceeds `bound`: its density, with t = bound / u, by the midpoint rule."""
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    total = 0.0
    for k in range(steps):
        u = (k + 0.5) / steps
        t = bound / u
        total += (1 + t * t / degrees) ** (-(degrees + 1) / 2) * bound / u**2 / steps
    return 2 * scale * total


def test_sixteen_bits_train_as_fp32_does_but_for_precision() -> None:
    wanted = {**REFERENCE.course, "precision": ""}
    held = load_ledger().claim("repro-precision").rows
    names = {row.variables["experiment"] for row in held}
    assert names <= {f"convergence/{name}" for name in EXPERIMENTS}
    for name in names:
        experiment = EXPERIMENTS[str(name).removeprefix("convergence/")]
        assert {**experiment.course, "precision": ""} == wanted


def test_the_release_is_compared_under_its_stage_1() -> None:
    """All-reduce and then all-gather in fp16, against the same layout without ZeRO (or one process)."""
    read = [
        sorted(experiments_read(row.evidence[0].value, row.variables))
        for row in load_ledger().claim("ds-same-loss").rows
        if row.evidence
    ]
    for pair in read:
        layouts = [EXPERIMENTS[name.removeprefix("convergence/")].layout for name in pair]
        assert {layout.zero for layout in layouts} == {0, 1}
        assert {layout.precision for layout in layouts} == {"fp16"}
        assert len({(layout.dp, layout.tp) for layout in layouts}) == 1


def test_the_schedule_is_turing_nlgs_at_a_six_hundredth() -> None:
    printed = {
        row.label: row.printed.value
        for row in load_ledger().claim("tnlg-training-recipe").rows
        if row.printed
    }
    training = REFERENCE.training
    scale = printed["iterations"] / training.steps
    assert scale == 600
    assert training.warmup_steps == round(printed["warm-up"] / scale)
    assert training.decay_steps == round(printed["cosine over"] / scale)
