"""Tests that layouts and models which no step supports are refused with one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import repro
from repro.config import ConfigError, Layout, engines
from tests.parallel.test_architectures import FAMILIES
from tests.training import TINY, tiny
from tests.wrap.stock_models import Tied, optimizer_of

SETS = "fused, fused-2024, fused-2026, megatron-2025, reference, softmax, torchtitan-2024"
INTERLEAVED = {"pp": 2, "schedule": "interleaved"}
SELECTIVE = {"recompute": "selective"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 3}, "pp = 3: must be a divisor of layers = 4"),
        ({"pp": 8}, "at most layers = 4"),
        ({"pp": 2, "stage_layers": (1, 2)}, "whose sum is layers = 4"),
        ({"pp": 2, "stage_layers": (4,)}, "one number of layers for each of pp * chunks = 2 parts"),
        ({"pp": 4, "stage_layers": (2, 0, 1, 1)}, "1 or more layers in each part; only the first"),
        ({"pp": 2, "stage_layers": (5, -1)}, "1 or more layers in each part; only the first"),
        ({**INTERLEAVED, "chunks": 2, "global_batch": 3}, "multiples of pp = 2"),
        (INTERLEAVED, "at least 2 with schedule = interleaved"),
        ({"pp": 2, "chunks": 2}, "1 unless schedule = interleaved"),
        ({"schedule": "interleaved", "chunks": 2}, "pp > 1"),
        ({"pp": 2, "zero": 3}, "stage 3 would gather all parameters twice per micro-batch"),
        (
            {"zero": 3, "schedule": "gpipe", "global_batch": 2},
            "schedule = 'gpipe': must be 1f1b with zero = 3",
        ),
        ({"pp": 2, "scatter_gather": True}, "tp > 1, pp > 1 and sp = false"),
        ({"sp": True}, "tp > 1"),
        ({"order": "pp-pp-tp"}, "one of tp-dp-pp"),
        ({"schedule": "zb-h1"}, "one of gpipe, 1f1b, interleaved"),
        ({"pa": True, "tp": 2}, "pa = true: needs recompute = true"),
        ({"pa_cpu": True}, "pa_cpu = true: needs recompute = true"),
        ({"pa": True, "recompute": True}, "pa = true: needs tp > 1 and sp = false"),
        ({"pa": True, "recompute": True, "tp": 2, "sp": True}, "pa = true: needs tp > 1 and sp = false"),
        ({"pa_cpu": True, "recompute": True, "tp": 2}, "pa_cpu = true: needs pa = true"),
        ({"cb": False, "zero": 3, "dp": 2}, "cb = false: must be true with zero = 3"),
        ({"pa": True, "tp": 2, **SELECTIVE}, "pa = true: needs recompute = true"),
        ({"pa_cpu": True, **SELECTIVE}, "pa_cpu = true: needs recompute = true"),
        ({"cp": 2, **SELECTIVE}, "cp = 2: must be 1 with recompute = selective"),
        (SELECTIVE, "recompute = 'selective': must be none or block, since fused attention stores"),
        ({"cp": 0}, "cp = 0: must be an integer of at least 1"),
        ({"cp": 3}, "seq = 16: must be a multiple of 2 cp = 6, for two chunks per rank"),
        ({"cp": 2, "kernels": "softmax"}, "cp = 2: must be 1 with kernels = softmax"),
        ({"zero3_gather": "parameter", "dp": 2, "zero": 2}, "zero3_gather"),
        ({"kernels": "apex"}, f"kernels = 'apex': must be one of {SETS}, unfused"),
        ({"overlap": False, "dp": 2, "zero": 3}, "overlap = false: must be true with zero = 3"),
    ],
)
def test_unsupported_layouts_are_refused(settings: dict[str, Any], message: str) -> None:
    tiny(Layout(cp=4, tp=4, sp=True, micro_batch=2))  # 16 tokens suffice for two chunks of 4 cp ranks
    with pytest.raises(ConfigError) as refused:
        tiny(Layout(**settings))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "settings", "engine", "message"),
    [
        ("llama", {"kernels": "unfused"}, "native", f"must be one of {SETS}, since operators of"),
        (
            "bloom",
            {},
            "torch",
            "embedding_norm = true: must be the value of GPT-2, the only model of engine t",
        ),
        (
            "neox",
            {},
            "megatron",
            "positions = 'rotary': must be the value of GPT-2, the only model of engine m",
        ),
        ("llama", {"tp": 4}, "deepspeed", "tp = 4: must be at most kv_heads = 2 with engine deepspeed"),
        ("", SELECTIVE, "torch", "recompute = 'selective': must be false or true with engine torch"),
        ("", {"kernels": "softmax", **SELECTIVE}, "deepspeed", "must be false or true with engine deepspeed"),
        *(("", {"cp": 2}, name, f"cp = 2: must be 1 with engine {name}") for name in ("torch", "deepspeed")),
        ("", {"cp": 2}, "megatron", "cp = 2: must be 1 with engine megatron"),
    ],
)
def test_unsupported_models_and_engines_are_refused(
    family: str, settings: dict[str, Any], engine: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny(Layout(**settings), FAMILIES.get(family, TINY), engine, dropout=0, attention_dropout=0)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tp_divides_or_is_a_multiple_of_kv_heads() -> None:
    model = replace(TINY, heads=12, hidden=48, kv_heads=3)
    for tp in (3, 6):
        engines.check_layout_fits(Layout(tp=tp), model, model.seq)
    with pytest.raises(ConfigError, match="tp = 2: must be a divisor or a multiple of kv_heads = 3"):
        engines.check_layout_fits(Layout(tp=2), model, model.seq)


def test_stock_module_refuses_operator_sets() -> None:
    module = Tied()
    with pytest.raises(
        ConfigError, match="kernels = 'softmax': must be fused: a stock module defines its own"
    ):
        repro.parallelize(module, optimizer_of(module, "adamw"), Layout(kernels="softmax"))
