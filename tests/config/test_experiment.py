"""Tests of an experiment: settings that change its key, keys of older records, and limits of sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from repro.config import (
    ConfigError,
    EmulatedNetwork,
    Experiment,
    Layout,
    Limits,
    Model,
    Training,
    TwinOf,
    from_dict,
    sizes,
)
from repro.config.experiment import _chosen_layout as chosen_fields
from tests.training import tiny

MODEL = Model(name="tiny", layers=4, hidden=16, heads=4, vocab=64, seq=16)
NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=8e6)
BASE = Experiment(name="a", model=MODEL, layout=Layout(dp=2, micro_batch=4), training=Training(steps=6))


def as_read(experiment: Experiment) -> dict[str, Any]:
    """Return the dictionary of an experiment as read from a record."""
    return dict(json.loads(json.dumps(experiment.as_dict())))


def test_names_timeouts_and_notes_do_not_change_the_key() -> None:
    remarks = replace(MODEL, note="a note", source="a paper", published_name="1B", published_params=1e9)
    assert replace(BASE, name="b", limits=Limits(timeout_s=1, hang_s=1), model=remarks).key == BASE.key


CHANGES: list[dict[str, Any]] = [
    {"layout": Layout(dp=2, micro_batch=4, zero=1)},
    {"layout": Layout(dp=2, micro_batch=4, cb=False)},
    {"layout": Layout(dp=2, micro_batch=4, order="dp-tp-pp")},
    {"layout": Layout(dp=2, micro_batch=4, global_batch=16)},
    {"layout": Layout(dp=1, micro_batch=4, pp=2)},
    {"training": Training(steps=7)},
    {"training": Training(steps=6, clip=0.5)},
    {"model": replace(MODEL, ffn=32)},
    {"limits": Limits(memory_bytes=10**9)},
    {"engine": "torch"},
    {"system": "dgx2"},
    {"network": NETWORK},
    {"network": replace(NETWORK, between=16e6)},
]


def test_every_change_of_a_condition_gives_another_key() -> None:
    keys = [BASE.key, *(replace(BASE, **change).key for change in CHANGES)]
    assert len(set(keys)) == len(keys)


def test_defaults_keep_the_key_if_explicit_or_of_a_new_option() -> None:
    @dataclass(frozen=True, kw_only=True)
    class NewLayout(Layout):
        option: int = 0

    explicit = {**vars(Layout()), "dp": 2, "micro_batch": 4, "global_batch": 8}
    assert replace(BASE, layout=Layout(**explicit)).key == BASE.key
    within = [replace(BASE, network=network).key for network in (NETWORK, replace(NETWORK, within=0.0))]
    assert within[0] == within[1]
    assert replace(BASE, layout=NewLayout(dp=2, micro_batch=4)).key == BASE.key
    assert replace(BASE, layout=NewLayout(dp=2, micro_batch=4, option=1)).key != BASE.key


def test_experiment_is_read_from_a_record_with_missing_options() -> None:
    pipeline = replace(BASE, layout=Layout(pp=2, tp=2, stage_layers=(1, 3), micro_batch=2, global_batch=8))
    for other in (pipeline, replace(BASE, network=NETWORK)):
        assert from_dict(as_read(other)) == other
    old = as_read(BASE)
    for key in old["layout"].keys() - {"dp", "tp", "micro_batch", "global_batch", "zero", "precision"}:
        del old["layout"][key]
    del old["network"]
    assert from_dict(old) == BASE
    assert from_dict(old).key == BASE.key


def test_separate_ddp_buckets_need_zero_0_and_several_replicas() -> None:
    assert "gradient_as_bucket_view" not in chosen_fields(BASE.layout)
    copies = replace(BASE.layout, gradient_as_bucket_view=False)
    assert chosen_fields(copies) == {**chosen_fields(BASE.layout), "gradient_as_bucket_view": False}
    for other in ({"zero": 1, "dp": 2}, {"zero": 3, "dp": 2}, {"dp": 1}):
        with pytest.raises(ConfigError, match=r"view = false: must be true unless zero = 0 and dp > 1"):
            Layout(**other, gradient_as_bucket_view=False)


def test_fp32_gradients_need_16_bit_precision() -> None:
    narrow = replace(BASE.layout, precision="bf16")
    assert "grad_dtype" not in chosen_fields(narrow)
    wide = replace(narrow, grad_dtype="fp32")
    assert chosen_fields(wide) == {**chosen_fields(narrow), "grad_dtype": "fp32"}
    assert (narrow.grad_bytes, wide.grad_bytes, BASE.layout.grad_bytes) == (2, 4, 4)
    with pytest.raises(ConfigError, match="grad_dtype = 'fp32': needs precision = bf16 or fp16"):
        Layout(grad_dtype="fp32")
    with pytest.raises(ConfigError, match="grad_dtype = 'bf16': must be one of precision, fp32"):
        Layout(precision="bf16", grad_dtype="bf16")


@pytest.mark.parametrize("kernels", ["fused", "reference", "softmax", "unfused"])
def test_records_without_tp_overlap_keep_their_key(kernels: str) -> None:
    overlapped = kernels in ("fused", "reference")
    experiment = replace(BASE, layout=Layout(tp=2, micro_batch=4, kernels=kernels, tp_overlap=overlapped))
    old = as_read(experiment)
    del old["layout"]["tp_overlap"]
    assert from_dict(old) == experiment
    other = replace(experiment, layout=replace(experiment.layout, tp_overlap=not overlapped))
    assert other.key != experiment.key
    # The key contains only options that differ from the defaults of its kernels.
    chosen = {"tp": 2, "micro_batch": 4, "global_batch": 4}
    chosen |= {"kernels": kernels} if kernels != "fused" else {}
    assert chosen_fields(experiment.layout) == chosen
    single = Layout(micro_batch=4, kernels=kernels)
    assert chosen_fields(single) == chosen_fields(replace(single, tp_overlap=False))


def test_cuda_graphs_need_two_untimed_steps() -> None:
    with pytest.raises(ConfigError, match="untimed_steps = 1: must be at least 2 with cuda_graphs = true"):
        replace(BASE, layout=Layout(cuda_graphs=True), training=Training(steps=6, untimed_steps=1))


def test_scaled_network_has_rates_in_proportion_to_flops() -> None:
    network = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6, within=20e6, flops_per_s=4e9)
    scaled = network.scaled(6e9)
    assert (scaled.between, scaled.within, scaled.flops_per_s) == (12e6, 30e6, 6e9)
    assert scaled.world == network.world
    assert "4e+09" not in str(network)


def test_original_of_a_twin_does_not_change_the_key() -> None:
    """A changed prediction of the original keeps the keys of runs."""
    plain = tiny(Layout())
    original = TwinOf(original="lowbw-megatron", part=0.2, between=4.8e9, numbers={"hW/F": (0.5, 0.6)})
    twin = replace(plain, twin=original)
    assert from_dict(as_read(twin)) == twin
    assert (twin.key, hash(twin)) == (plain.key, hash(replace(twin)))
    with pytest.raises(ConfigError, match="part = 0"):
        replace(original, part=0)


LIMITS = [limit for limit in vars(sizes).values() if isinstance(limit, sizes.SizeLimit)]
MODEL_SIZES = ("layers", "decoder_layers", "hidden", "head_dim", "ffn", "vocab", "seq")
model = partial(replace, MODEL)
TOO_LARGE: list[tuple[Callable[[], object], str]] = [
    *((partial(model, **{key: 10**12}), f"{key} = {10**12}") for key in MODEL_SIZES),
    (lambda: model(heads=10**9, hidden=10**9), "hidden = 1000000000"),
    (lambda: model(layers=4096, hidden=2**20), "parameters = 54"),
    (lambda: Layout(dp=10**9), "dp = 1000000000"),
    (lambda: Layout(dp=2**12, tp=2**12), "tp x pp x dp = 16777216"),
    (lambda: Layout(micro_batch=10**12), "micro_batch = 1000000000000"),
    (lambda: Layout(bucket_bytes=10**21), "bucket_bytes = 1000000000000000000000"),
    (lambda: Layout(global_batch=10**6), "x pp x chunks = 1000000"),
    (lambda: Layout(pp=8, global_batch=10**5), "x pp x chunks = 800000"),
    (lambda: Training(steps=10**12), "steps = 1000000000000"),
    (lambda: replace(BASE, model=model(seq=2**24), layout=Layout(micro_batch=2**20)), "largest tensor = "),
]


@pytest.mark.parametrize(("make", "message"), TOO_LARGE, ids=[message for _, message in TOO_LARGE])
def test_error_names_the_exceeded_limit_and_its_reason(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    line = str(caught.value)
    assert message in line
    assert any(f"at most {limit.value:,} ({limit.why})" in line for limit in LIMITS)
