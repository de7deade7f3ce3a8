"""Tests of measured groups, of rates that are fitted to measurements, and of tables of the calibration file."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.accuracy.calibrate import document, fit, plan
from repro.accuracy.calibrate.fit import TimedCall
from repro.accuracy.calibrate.plan import BETWEEN, INSIDE, GroupKind
from repro.config.files import tomllib
from repro.config.timing import OperatorRate
from repro.parallel import mesh as meshes

SIZES = [(2.0**k, 2.0**j) for k in range(10, 26, 3) for j in range(12, 34, 5)]
TERM = st.floats(min_value=0.1, max_value=10.0)


def points_of(rate: OperatorRate, factors: Sequence[float] = (1.0,) * len(SIZES)) -> list[TimedCall]:
    return [
        TimedCall(nbytes, flops, rate.seconds(flops=flops, nbytes=nbytes) * factor)
        for (nbytes, flops), factor in zip(SIZES, factors, strict=True)
    ]


@given(TERM, TERM, TERM)
def test_known_coefficients_are_recovered(fixed: float, per_byte: float, per_flop: float) -> None:
    rate = OperatorRate(fixed_s=fixed * 1e-5, per_byte_s=per_byte * 1e-10, per_flop_s=per_flop * 1e-11)
    found = fit.fit_rate(points_of(rate))
    expected = (rate.fixed_s, rate.per_byte_s, rate.per_flop_s)
    assert (found.fixed_s, found.per_byte_s, found.per_flop_s) == pytest.approx(expected, rel=1e-4, abs=0)


@given(st.lists(st.floats(min_value=0.9, max_value=1.1), min_size=len(SIZES), max_size=len(SIZES)))
def test_noisy_points_change_times_by_less_than_25_percent(noise: list[float]) -> None:
    rate = OperatorRate(fixed_s=1e-5, per_byte_s=1e-10, per_flop_s=1e-11)
    found = fit.fit_rate(points_of(rate, noise))
    assert max(abs(error) for error in fit.relative_errors(found, points_of(rate))) < 0.25


@given(st.lists(st.tuples(TERM, TERM, TERM), min_size=1, max_size=8))
def test_fitted_times_are_not_negative_and_increase(rows: list[tuple[float, float, float]]) -> None:
    found = fit.fit_rate([TimedCall(a * 1e6, b * 1e6, c * 1e-4) for a, b, c in rows])
    assert found.seconds(flops=0, nbytes=0) >= 0
    assert found.seconds(flops=1e9, nbytes=1e9) >= found.seconds(flops=1e8, nbytes=1e8)


def test_operators_have_separate_rates_only_if_they_differ() -> None:
    """Operators of equal speed share `elementwise`; slower operators and products have separate rates."""
    sizes = [2.0**k for k in range(12, 26, 2)]
    elementwise = [TimedCall(n, 0, 5e-6 + n * 1e-10) for n in sizes]
    product = [TimedCall(n, n**1.5, 1e-5 + n**1.5 * 1e-11) for n in sizes]
    found = fit.operator_rates(
        {
            **dict.fromkeys(("aten.add", "aten.mul", "aten.sub"), elementwise),
            **dict.fromkeys(("aten.mm", "aten.bmm"), product),
            "repro.slow": [TimedCall(n, n, 2e-4 + n * 1e-9) for n in sizes],
            "aten.sqrt": [TimedCall(8, 0, 2e-5)],
            "aten.gelu": [TimedCall(2.0**22, 0, 5e-6 + 2.0**22 * 8e-10)],
        }
    )
    assert sorted(found) == ["aten.gelu", "aten.sqrt", "elementwise", "matmul", "repro.slow"]
    assert fit.rate_of(found, "aten.baddbmm") == found["matmul"]
    assert fit.rate_of(found, "repro.slow").fixed_s == pytest.approx(2e-4, rel=1e-3)
    gelu = fit.rate_of(found, "aten.gelu")
    assert gelu.fixed_s == found["elementwise"].fixed_s
    assert gelu.per_byte_s == pytest.approx(8e-10, rel=0.02), "eight times as slow as elementwise"
    sqrt = fit.rate_of(found, "aten.sqrt")
    assert sqrt.fixed_s == pytest.approx(2e-5, rel=0.01)
    assert sqrt.per_byte_s == found["elementwise"].per_byte_s, "eight bytes do not determine the rate"


def test_few_bytes_do_not_determine_the_byte_rate() -> None:
    """A median over a call on a number and a call on a mask would be thousands of times too large."""
    common = OperatorRate(fixed_s=1e-5, per_byte_s=4e-10)
    number, mask = TimedCall(8, 0, 3e-5), TimedCall(120_000, 0, 3 * 4.8e-5 + 1e-5)
    found = fit.scale_rate(common, [number, mask])
    assert found.seconds(flops=0, nbytes=mask.nbytes) == pytest.approx(mask.seconds)
    assert found.seconds(flops=0, nbytes=number.nbytes) == pytest.approx(common.fixed_s, rel=1e-3)


def test_written_tables_are_read_back() -> None:
    """The tables contain names with dots, numbers with sources, lists of points and text with quotes."""
    tables = {
        "note": 'it is a "note" — \\ here',
        "nodes": {"value": 1, "source": "this machine"},
        "device": {"name": "x", "operators": {"aten.mm": {"fixed_s": 1.5e-06}, "matmul": {"fixed_s": 1e-5}}},
        "links": {"memory": {"collectives": {"send": {"points": [[1024, 1e-4], [4096, 2.5e-4]]}}}},
        "flag": True,
    }
    assert tomllib.loads(document.toml_text(tables)) == tables


def test_smaller_payload_takes_no_longer_than_a_larger_one() -> None:
    """The slowest rank counts. A disturbed small message gets the seconds of the next larger message."""

    def row(*seconds: float) -> list[list[object]]:
        return [[2**10 * 4**i, [s, s, s, 5]] for i, s in enumerate(seconds)]

    found = fit.collective_points([row(9e-4, 2e-4, 3e-4), row(1e-4, 1e-4, 5e-4)])
    assert found == [[2**10, 2e-4], [2**12, 2e-4], [2**14, 5e-4]]


def test_context_bytes_are_the_largest_of_all_ranks() -> None:
    gpu = {"name": "A", "compute_capability": "9.0", "memory_bytes": 80}
    machine = {"gpus": [gpu], "memory": {"total_bytes": 100}, "nvlink": True}
    found = document._gpu([{"machine": machine, "context_bytes": size} for size in (5, 7, 6)])
    assert found["context_bytes"]["value"] == 7
    assert found["context_bytes"]["source"].startswith("measured: memory in use outside torch")


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
