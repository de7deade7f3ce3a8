"""Tests of models of transformers and peft: each trains and generates like a single process."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from tests.pool import RankPool

if find_spec("peft") is None:
    pytest.skip("not installed: pip install -e '.[test]'", allow_module_level=True)

from tests.wrap.foreign_models import CASES, Trained, train


@cache
def reference(name: str) -> Trained:
    torch.set_num_threads(1)
    return train(name, None)


STAGES = [*product(CASES, (0, 3)), ("t5", 1), ("t5", 2)]


@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_library_model_trains_like_one_process(two: RankPool, name: str, zero: int) -> None:
    expected = reference(name)
    found = two.run(train, name, zero)
    means = [sum(both) / len(both) for both in zip(*(each.losses for each in found), strict=True)]
    assert means == pytest.approx(expected.losses, rel=1e-6)
    for mine, full in zip(zip(*(each.tokens for each in found), strict=True), expected.tokens, strict=True):
        assert torch.equal(torch.cat(mine), full)
    for each in found:
        for key, value in expected.weights.items():
            torch.testing.assert_close(each.weights[key], value, rtol=1e-5, atol=1e-6, msg=key)
