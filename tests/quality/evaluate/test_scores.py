"""Tests that the native model with imported weights has the scores of transformers, under every layout.

`tests/quality/weights` shows that the logits are equal, also for weights of Megatron-LM and native checkpoints.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.quality.evaluate.samples import Samples
from repro.quality.weights import open_weights
from tests.pool import RankPool
from tests.quality.evaluate.rank_scores import FORBIDDEN, continue_greedily, samples, score, state_bytes
from tests.quality.weights.reference_weights import gpt2, tokens

pytestmark = pytest.mark.xdist_group("ranks")
transformers = pytest.importorskip("transformers", reason="not installed: pip install -e '.[test]'")
ONE = Layout(micro_batch=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt2()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(path)
    return path


def expected_rows(model: Any, windows: Samples) -> list[tuple[int, float, bool, bool]]:
    """Return for each window the loss of transformers, and whether all predictions are correct."""
    found = []
    for number, (begin, length, scored) in enumerate(windows.spans.tolist()):
        text = torch.from_numpy(windows.tokens[begin : begin + length])
        with torch.no_grad():
            rows = model(text[None, :-1]).logits[0, -scored:].double()
        targets = text[-scored:]
        loss = torch.nn.functional.cross_entropy(rows, targets, reduction="sum")
        correct = bool((rows.argmax(1) == targets).all())
        rows[:, FORBIDDEN] = float("-inf")
        found.append((number, float(loss), correct, bool((rows.argmax(1) == targets).all())))
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ONE),
        (4, Layout(tp=2, dp=2, zero=3, micro_batch=1)),
        (4, Layout(tp=2, pp=2, micro_batch=3)),
        (4, Layout(tp=4, micro_batch=3)),  # 90 tokens become 92 by padding, a multiple of four
    ],
    indirect=["ranks"],
    ids=["one", "tp2-dp2-zero3", "tp2-pp2", "tp4"],
)
def test_scores_of_every_layout_equal_those_of_transformers(
    model: Any, folder: Path, ranks: RankPool | None, layout: Layout
) -> None:
    found = ranks.run(score, layout, folder) if ranks else [score(layout, folder)]
    rows = sorted(row for of_rank in found for row in of_rank)
    expected = expected_rows(model, samples())
    assert [row[1] for row in rows] == pytest.approx([row[1] for row in expected], rel=1e-5)
    assert [(row[0], *row[2:]) for row in rows] == [(row[0], *row[2:]) for row in expected]


@pytest.mark.parametrize("forbidden", [[], FORBIDDEN])
def test_greedy_continuations_equal_those_of_transformers(
    two: RankPool, model: Any, folder: Path, forbidden: list[int]
) -> None:
    prompts = tokens(3, 5)
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    settings |= {"bad_words_ids": [[i] for i in forbidden]} if forbidden else {}
    with torch.no_grad():
        expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings).tolist()
    for found in two.run(continue_greedily, Layout(tp=2, micro_batch=3), folder, 6, forbidden):
        assert found == expected


def test_stage_3_evaluation_has_only_a_parameter_shard(two: RankPool, folder: Path) -> None:
    """After a pass, each of two ranks has half of the parameters, and no gradients or optimizer states."""
    full = sum(math.prod(place.shape) for place in open_weights(folder).parameter_shapes.values())
    for nbytes in two.run(state_bytes, folder):
        assert nbytes == pytest.approx(4 * full / 2, rel=0.01)
