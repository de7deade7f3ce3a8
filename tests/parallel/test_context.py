"""Tests of context parallelism: parity with one process, balanced work, traffic and activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.config import Layout, Model
from repro.config.enums import Category
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel.context import chunks, positions
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.trace.events import Operator
from repro.simulate.trace.recorder import TraceRecorder
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_architectures import FAMILIES, FAST
from tests.parallel.test_parity import BATCH, DROPOUT, assert_parity, name_of
from tests.pool import pool_of
from tests.training import tiny, train

CP2 = Layout(cp=2, micro_batch=BATCH)
CP4 = Layout(cp=4, micro_batch=BATCH)
CP2_TP2 = Layout(cp=2, tp=2, sp=True, zero=2, micro_batch=4, global_batch=BATCH)
CP2_PP2 = Layout(cp=2, pp=2, micro_batch=2, global_batch=BATCH)


@pytest.mark.parametrize(
    "layout",
    [
        replace(CP2, recompute=True, zero=2, micro_batch=4, bucket_bytes=20_000),
        replace(CP2, cb=False, overlap=False, zero=1),
        replace(CP2, gradient_as_bucket_view=False),
        replace(CP4, micro_batch=4, zero=3, recompute=True),
        Layout(cp=2, tp=2, micro_batch=BATCH, recompute=True, pa=True),
        replace(CP2_PP2, schedule="interleaved", chunks=2, order="pp-tp-dp"),
        Layout(cp=2, tp=2, dp=2, sp=True, zero=3, micro_batch=4, recompute=True),
        replace(CP2_PP2, tp=2, zero=2, micro_batch=4, scatter_gather=True, recompute=True),
    ],
    ids=name_of,
)
def test_layouts_with_cp_equal_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Dropout of hidden states and of attention weights drops the same elements as in one process."""
    assert_parity(request, layout, parameters=3e-5, **FAST, **DROPOUT)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *((replace(CP2, recompute=True), family) for family in ("biased", "plain")),
        *((CP4, family) for family in ("neox", "bloom")),
        # Both tp ranks have falcon's only head of keys.
        *((replace(CP2_TP2, recompute=True), family) for family in ("llama", "falcon", "bloom")),
    ],
    ids=name_of,
)
def test_families_equal_one_process(request: pytest.FixtureRequest, layout: Layout, family: str) -> None:
    """Without dropout, attention runs torch's fused kernel."""
    assert_parity(request, layout, FAMILIES[family], **FAST)


@pytest.mark.parametrize(
    ("cp", "tp", "family", "recompute"),
    [(2, 1, "neox", False), (4, 1, "llama", True), (2, 2, "falcon", True)],
)
def test_cp_sends_only_keys_and_values(
    request: pytest.FixtureRequest, cp: int, tp: int, family: str, recompute: bool
) -> None:
    """A layer has two all-gathers and one reduce-scatter of 2 b s h_kv elements; a ring sends (cp-1)/cp of them."""
    b, model = 4, FAMILIES[family]
    layout = Layout(cp=cp, tp=tp, micro_batch=b, recompute=recompute)
    message = 2 * b * model.seq * max(1, model.key_heads // tp) * model.head_width * 4
    for seen in pool_of(request, layout).run(train, tiny(layout, model, steps=2, untimed_steps=1)):
        rows = {row["op"]: row for row in seen.traffic if row["group"] == "cp"}
        assert rows.keys() == {"all_gather", "reduce_scatter"}
        for op, row in rows.items():
            calls = model.layers * (2 if op == "all_gather" else 1)
            assert (row["purpose"], row["calls"]) == ("keys and values", calls)
            assert row["payload_bytes"] == calls * message
            assert row["sent_bytes"] == calls * message * (cp - 1) // cp


def attention_of(layout: Layout, model: Model, rank: int) -> list[Operator]:
    """Return the attention operators in a step of one cp rank, traced on `meta` tensors."""
    recorder = TraceRecorder()
    with recorder:
        mesh = meshes.shape_only_mesh(layout, rank)
        engine = NativeEngine(tiny(layout, model), mesh, torch.device("meta"))
        tokens = torch.empty(layout.micro_batch, model.seq, dtype=torch.int64, device="meta")
        engine.step([MicroBatch(tokens, tokens, BatchPosition(0, 0))], recorder.phase)
    return [e for e in recorder.finish() if isinstance(e, Operator) and "attention" in e.name]


def causal_flops(operator: Operator) -> float:
    """Return the FLOP of causal scores: c queries that end at key k need k - c/2 scores each."""
    lengths = [shape[2] for shape in operator.shapes if len(shape) == 4]
    queries, keys = min(lengths), max(lengths)
    return operator.flops * (keys - queries / 2) / keys


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_cp_ranks_have_equal_attention_work(family: str) -> None:
    """Each of four ranks has 1/4 of the FLOP. Contiguous quarters of the sequence would have 1/16 to 7/16."""
    model = replace(FAMILIES[family], seq=64)
    total_flops = sum(map(causal_flops, attention_of(Layout(micro_batch=2), model, 0)))
    layout = Layout(cp=4, micro_batch=2)
    rank_flops = [sum(map(causal_flops, attention_of(layout, model, rank))) for rank in range(4)]
    assert rank_flops == [pytest.approx(total_flops / 4)] * 4


def test_cp_divides_activations_except_gathered_keys_and_values() -> None:
    """A cp rank retains the activations of s/cp of the s tokens, and the gathered keys and values of one layer."""
    model = replace(FAMILIES["llama"], seq=256, layers=8)

    def activation_bytes(layout: Layout, seq: int) -> int:
        experiment = tiny(layout, model, seq=seq)
        return measure_live_bytes(trace(experiment, roles(experiment)[0]).events).most[Category.ACTIVATIONS]

    gathered_bytes = 2 * 256 * model.key_heads * model.head_width * 4
    shorter, divided = activation_bytes(Layout(), 64), activation_bytes(Layout(cp=4), 256)
    assert shorter < divided < shorter + 3 * gathered_bytes, "keys and values of one layer, not of eight"


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_token_is_on_one_cp_rank(size: int, tp: int, each: int, data: st.DataObject) -> None:
    """Chunks cover a sample. Sequence parallelism splits a rank's two chunks at any token."""
    s = 2 * size * tp * each
    tokens: list[int] = []
    for rank in range(size):
        own = [i for at in chunks(rank, size, s) for i in at]
        assert len(own) == s // size
        cp = meshes.shape_only_mesh(Layout(cp=size), rank).cp
        parts = [positions(cp, s // size // tp, part, tp) for part in range(tp)]
        table = torch.arange(s)
        assert [i for at in parts for i in at.rows(table, s // size // tp).tolist()] == (
            own if size > 1 else list(range(s))
        )
        tokens += own
    assert sorted(tokens) == list(range(s))
