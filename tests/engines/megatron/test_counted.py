"""What is seen of megatron-core from outside: states by precision, a layer's messages, a stage's order of passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.config.enums import Phase
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from repro.parallel.pipeline.schedule import build_schedule as schedule
from repro.parallel.pipeline.schedule import dependency_of
from tests.engines.megatron.both import build, needs_megatron
from tests.engines.slowed import busy_and_idle, of_formula
from tests.pool import RankPool
from tests.training import TINY, micro_batches, smallest, tiny

pytestmark = needs_megatron
B = 8


def seen(layout: Layout, layers: int, engine: str = "megatron") -> dict[str, Any]:
    experiment = tiny(layout, replace(TINY, layers=layers), engine, steps=4, untimed_steps=2)
    run = ExperimentRun(
        experiment, meshes.distributed_mesh(layout, "cpu"), torch.device("cpu"), lambda step, phase: None
    )
    run.prelude()
    run.steps(2)
    return run.result().as_dict()


STATES = {
    ("fp32", 0): (4, 4, 8),
    ("bf16", 0): (2, 4, 12),
    ("fp16", 0): (2, 2 + 4, 12),
    ("fp32", 1): (4, 4, 8 / 2),
    ("bf16", 1): (2, 4, 12 / 2),
    ("fp16", 1): (2, 2 + 4 / 2, 12 / 2),
}
"""Bytes a parameter on one of two replicas: the library's own table (its distributed optimizer's documentation) says
16, 18 and 20 without, and 8 + 8/d, 6 + 12/d and 4 + 16/d with it.  Gradients of bf16 are in fp32, and those of fp16
are copied to fp32 for the update."""


@pytest.mark.parametrize(("precision", "zero"), STATES)
def test_states_are_those_of_the_librarys_table(two: RankPool, precision: str, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, precision=precision, micro_batch=4)
    for result in two.run(seen, layout, 4):
        psi, states = result["parameters"], result["memory"]["states"]
        expected = dict(zip(("parameters", "gradients", "optimizer"), STATES[precision, zero], strict=True))
        assert {part: states[part] / psi for part in expected} == pytest.approx(expected, rel=0.03)
        assert result["memory"]["peak"]["total"] > sum(states.values()) - 4 * psi
        assert result["padding"] == (0 if zero == 0 else pytest.approx(0, abs=0.03 * psi))
        assert result["software"]["name"].startswith("Megatron-core 0.16")
        assert result["software"]["configuration"]["ddp"].get("use_distributed_optimizer", False) == (
            zero == 1
        )


@pytest.mark.parametrize("zero", [0, 1])
def test_fp32_gradients_of_fp16_need_no_copy_for_the_update(two: RankPool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, precision="fp16", grad_dtype="fp32", micro_batch=4)
    for result in two.run(seen, layout, 4):
        psi, states = result["parameters"], result["memory"]["states"]
        expected = {"parameters": 2, "gradients": 4, "optimizer": 12 / (1 + zero)}
        assert {part: states[part] / psi for part in expected} == pytest.approx(expected, rel=0.03)
        assert result["software"]["configuration"]["ddp"]["grad_reduce_in_fp32"]


def messages(result: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Calls and payload bytes over the tp group, by operation."""
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for row in result["comm"]:
        if row["group"] == "tp":
            calls[row["op"]] += row["calls"]
            payload[row["op"]] += row["payload_bytes"]
    return calls, payload


A_LAYER = {
    "tp": (Layout(tp=2, micro_batch=B), {"all_reduce": 4}),
    "sp": (Layout(tp=2, sp=True, micro_batch=B), {"all_gather": 4 + 2, "reduce_scatter": 4}),
    "recompute": (Layout(tp=2, recompute=True, micro_batch=B), {"all_reduce": 4 + 2}),
    "pa": (Layout(tp=2, recompute=True, pa=True, micro_batch=B), {"all_reduce": 4 + 2, "all_gather": 1}),
}
"""Messages of one layer, forward and backward (1909.08053 sec. 3; 2205.05198 sec. 4.2.2, whose two further gathers
bring back inputs for the weights' gradients; recomputation repeats the forward pass; 1910.02054 sec. 6.1)."""


@pytest.mark.parametrize("name", A_LAYER)
def test_messages_of_a_layer(two: RankPool, name: str) -> None:
    """Theirs and ours; each is one activation, [b, s, h].  A model of three layers has one layer's more than of two."""
    layout, expected = A_LAYER[name]
    boundary = B * TINY.seq * TINY.hidden * 4
    for engine in ("megatron", "native"):
        (calls, payload), (fewer, less) = (
            messages(two.run(seen, layout, layers, engine)[0]) for layers in (3, 2)
        )
        assert calls - fewer == Counter(expected), engine
        assert {op: payload[op] - less[op] for op in expected} == {
            op: count * boundary for op, count in expected.items()
        }, engine


def activations(layout: Layout) -> tuple[list[float], dict[str, Any], int]:
    """Losses, settings of the model and largest bytes of activations."""
    result = seen(layout, 2)
    memory = result["memory"]["peak"]["total"]
    return result["loss"], result["software"]["configuration"]["transformer"], memory


def test_selective_recomputation_is_the_librarys(two: RankPool) -> None:
    """The library computes its core of attention again: the same losses with less memory and the same messages."""
    layout = Layout(tp=2, sp=True, micro_batch=B)
    plain, chosen = (
        two.run(activations, replace(layout, recompute=word))[0] for word in ("none", "selective")
    )
    assert chosen[0] == plain[0]
    assert chosen[1]["recompute_granularity"] == "selective"
    assert "recompute_granularity" not in plain[1]
    assert chosen[2] < plain[2]
    calls, _ = messages(two.run(seen, replace(layout, recompute="selective"), 2)[0])
    assert calls == messages(two.run(seen, layout, 2)[0])[0]


SCHEDULES = [
    Layout(pp=2, micro_batch=1, global_batch=B),
    Layout(pp=2, schedule="interleaved", chunks=2, micro_batch=1, global_batch=B),
    Layout(pp=4, micro_batch=1, global_batch=B),
    Layout(pp=4, schedule="interleaved", chunks=2, micro_batch=1, global_batch=B),
]


def passes(layout: Layout) -> tuple[int, str, list[Phase]]:
    """The stage, its forwards and backwards in the order in which they begin, and its phases."""
    experiment = tiny(layout, smallest(layout), "megatron")
    engine, phases = build(experiment), list[Phase]()
    engine.step(micro_batches(experiment, 0, 0), phases.append)
    return engine.mesh.pp.rank, "".join(engine.passes.order), phases


def _waited(phases: list[Phase]) -> list[bool]:
    """Of each pass whether the stage has waited since the one before began."""
    found, idle = [], False
    for phase in phases:
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            found.append(idle)
        idle = phase == Phase.IDLE
    return found


@pytest.mark.parametrize("layout", SCHEDULES, ids=lambda layout: f"{layout.schedule}-{layout.pp}")
def test_stages_run_the_schedules_of_ours(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Forwards and backwards take turns as `repro.parallel.pipeline.schedule` has it."""
    ours = schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[layout.pp])
    for stage, order, phases in pool.run(passes, layout):
        assert order == "".join(action.kind for action in ours[stage])
        received = [
            needed is not None and needed[0] != stage
            for needed in (dependency_of(action, stage, layout.pp, layout.chunks) for action in ours[stage])
        ]
        # It waits for its sends too, and once more for the gradients of all micro-batches.
        assert all(waited for waited, needed in zip(_waited(phases), received, strict=False) if needed)


@pytest.mark.parametrize("layout", SCHEDULES[:2], ids=lambda layout: layout.schedule)
def test_stages_wait_for_their_part_of_the_passes(two: RankPool, layout: Layout) -> None:
    layout = replace(layout, global_batch=4)
    for busy, idle, _ in busy_and_idle(two, layout, "megatron"):
        assert idle / busy == pytest.approx(of_formula(layout))
