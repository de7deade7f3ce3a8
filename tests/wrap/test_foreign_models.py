"""Models and habits of libraries that know nothing of this one: each trains as it does alone."""

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
def alone(name: str) -> Trained:
    torch.set_num_threads(1)
    return train(name, None)


STAGES = [*product(CASES, (0, 3)), ("t5", 1), ("t5", 2)]


@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_a_foreign_model_trains_as_it_does_alone(two: RankPool, name: str, zero: int) -> None:
    expected = alone(name)
    found = two.run(train, name, zero)
    means = [sum(both) / len(both) for both in zip(*(each.losses for each in found), strict=True)]
    assert means == pytest.approx(expected.losses, rel=1e-6)
    for mine, full in zip(zip(*(each.tokens for each in found), strict=True), expected.tokens, strict=True):
        assert torch.equal(torch.cat(mine), full)
    for each in found:
        for key, value in expected.weights.items():
            torch.testing.assert_close(each.weights[key], value, rtol=1e-5, atol=1e-6, msg=key)
