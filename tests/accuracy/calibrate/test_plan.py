"""Tests of the measured groups: every kind of group of a layout, and all ranks in each kind."""

from __future__ import annotations

import pytest

from repro.accuracy.calibrate import fit, plan
from repro.accuracy.calibrate.plan import BETWEEN, INSIDE, GroupKind
from repro.parallel import mesh as meshes


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "distributed_mesh", lambda layout, kind: meshes.shape_only_mesh(layout, rank))


@pytest.mark.parametrize(
    ("world", "per_node", "expected"),
    [
        (1, 1, []),
        (2, 2, [GroupKind(2, 2, 1)]),
        (4, 4, [GroupKind(4, 4, 1), GroupKind(2, 2, 1), GroupKind(2, 2, 2)]),
        (3, 3, [GroupKind(3, 3, 1)]),
        (4, 2, [GroupKind(4, 2, 1), GroupKind(2, 2, 1), GroupKind(2, 1, 2)]),
        (4, 1, [GroupKind(4, 1, 1)]),
        (6, 3, [GroupKind(6, 3, 1), GroupKind(3, 3, 1), GroupKind(2, 1, 3)]),
        (16, 8, [(16, 8, 1), (8, 8, 1), (8, 4, 2), (4, 4, 1), (4, 2, 4), (2, 2, 1), (2, 1, 8)]),
    ],
)
def test_plan_has_every_kind_of_group_of_the_layouts(
    world: int, per_node: int, expected: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(world):
        be_rank(rank, monkeypatch)
        found = plan.group_kinds(world, per_node, "cpu")
        assert list(found) == expected
        for kind, group in found.items():
            assert group.size == kind.ranks
            assert rank in group.ranks
            assert group.ranks[1] - group.ranks[0] == kind.stride
            assert sum(r // per_node == rank // per_node for r in group.ranks) == kind.per_node
            assert kind.place == (INSIDE if len({r // per_node for r in group.ranks}) == 1 else BETWEEN)


@pytest.mark.parametrize(
    ("per_node", "rank", "expected"),
    [
        (4, 2, {INSIDE: (0, 1, 2, 3)}),
        (2, 1, {INSIDE: (0, 1), BETWEEN: (1, 3)}),
        (1, 3, {BETWEEN: (0, 1, 2, 3)}),
    ],
)
def test_pipeline_groups_are_inside_or_between_nodes(
    per_node: int, rank: int, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group has the neighbours on a node, the other has the ranks of equal position on all nodes."""
    be_rank(rank, monkeypatch)
    found = {place: group.ranks for place, group in plan.pipeline_groups(4, per_node, "cpu").items()}
    assert found == expected


def test_plan_covers_every_strategy_and_tensor_parallelism_stays_on_a_node() -> None:
    """The possible strategies depend on the number of ranks; all experiments have equal repeats."""
    for ranks in (1, 2, 3, 4, 8):
        found = plan.step_experiments("local", ranks, "fp32", quick=False)
        assert {(e.layout.world, e.training.steps) for e in found} == {(ranks, plan.REPEATS)}
        assert any(experiment.layout.zero == 3 for experiment in found)
        assert any(experiment.layout.pp > 1 for experiment in found) == (ranks > 1)
        assert any(experiment.layout.sp for experiment in found) == (ranks in (2, 4, 8))
    found = plan.step_experiments("local", 8, "fp32", quick=False, per_node=2)
    assert {(e.layout.tp, e.layout.dp) for e in found if e.layout.tp > 1} == {(2, 4)}
    assert {e.layout.world for e in found} == {8}


def test_links_inside_and_between_nodes_have_separate_tables() -> None:
    """Each of the two link classes has its own groups."""
    timing = (1e-3, 1e-3, 1e-3, 3)

    def row(op: str, place: str, seconds: float, **kind: int) -> dict[str, object]:
        return {"op": op, "place": place, "points": [(1000, timing), (10**6, (seconds, *timing[1:]))], **kind}

    result = {
        "per_node": 2,
        "links": [
            row("all_reduce", BETWEEN, 8e-3, ranks=4, per_node=2, stride=1),
            row("all_reduce", INSIDE, 2e-3, ranks=2, per_node=2, stride=1),
            row("all_reduce", BETWEEN, 9e-3, ranks=2, per_node=1, stride=2),
            row("send", INSIDE, 1e-3),
            row("send", BETWEEN, 4e-3),
        ],
        "overlap": {INSIDE: {"all_reduce": 0.5}, BETWEEN: {"all_reduce": 0.1}},
    }
    links = {"memory": {"per": "device", "bandwidth": {"value": "unknown", "source": "x"}}}
    found = fit.link_tables([result] * 4, links, "all at once")
    assert found["memory"]["bandwidth"]["value"] == pytest.approx(1e9)
    assert found["memory"]["collectives"]["all_reduce"]["ranks"] == 2
    network = found["inter-node"]
    assert network["bandwidth"]["value"] == pytest.approx(2 * 10**6 / 4e-3)
    assert network["per"] == "node"
    assert network["overlap_cost"]["value"] == pytest.approx(0.1)
    full = network["collectives"]["all_reduce"]
    assert full["per_node"] == 2
    assert "ranks" not in full
    assert [(g["ranks"], g["per_node"], g["stride"]) for g in full["groups"]] == [(2, 1, 2)]
