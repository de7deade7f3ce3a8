"""Tests of size limits of models, layouts and trainings: the error has the limit and its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repro.config import ConfigError, Experiment, Layout, Model, Training, sizes

LIMITS = [limit for limit in vars(sizes).values() if isinstance(limit, sizes.SizeLimit)]
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "seq": 128}


def model(**keys: int) -> Model:
    return Model(name="m", **{**SMALL, **keys})


TOO_LARGE: list[tuple[Callable[[], object], str]] = [
    (lambda: model(layers=10**9), "layers = 1000000000"),
    (lambda: model(decoder_layers=10**9), "decoder_layers = 1000000000"),
    (lambda: model(hidden=10**12), "hidden = 1000000000000"),
    (lambda: model(heads=10**9, hidden=10**9), "hidden = 1000000000"),
    (lambda: model(head_dim=10**9), "head_dim = 1000000000"),
    (lambda: model(ffn=10**12), "ffn = 1000000000000"),
    (lambda: model(vocab=10**12), "vocab = 1000000000000"),
    (lambda: model(seq=10**12), "seq = 1000000000000"),
    (lambda: model(layers=4096, hidden=2**20), "parameters = 54"),
    (lambda: Layout(dp=10**9), "dp = 1000000000"),
    (lambda: Layout(dp=2**12, tp=2**12), "tp x pp x dp = 16777216"),
    (lambda: Layout(micro_batch=10**12), "micro_batch = 1000000000000"),
    (lambda: Layout(bucket_bytes=10**21), "bucket_bytes = 1000000000000000000000"),
    (lambda: Layout(global_batch=10**6), "x pp x chunks = 1000000"),
    (lambda: Layout(pp=8, global_batch=10**5), "x pp x chunks = 800000"),
    (lambda: Training(steps=10**12), "steps = 1000000000000"),
    (
        lambda: Experiment(name="e", model=model(seq=2**24), layout=Layout(micro_batch=2**20)),
        "largest tensor = ",
    ),
]


@pytest.mark.parametrize(("make", "message"), TOO_LARGE, ids=[message for _, message in TOO_LARGE])
def test_error_names_the_exceeded_limit_and_its_reason(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    line = str(caught.value)
    assert message in line
    assert any(f"at most {limit.value:,} ({limit.why})" in line for limit in LIMITS)
