"""Tests that the native model with imported weights has the scores of transformers, under every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from repro.quality.evaluate.samples import split_windows
from repro.quality.weights import open_weights
from repro.quality.weights.huggingface import export_huggingface
from tests.engines.native.checkpoint.saved import HALF, checkpoint, experiment, train
from tests.engines.native.checkpoint.saved import LAYOUTS as TRAINED
from tests.pool import RankPool
from tests.quality.evaluate.rank_scores import (
    FORBIDDEN,
    LENGTH,
    STRIDE,
    continue_greedily,
    samples,
    score,
    scorer,
    state_bytes,
)
from tests.quality.weights.reference_weights import gpt2, megatron_ranks, save_megatron, tokens

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


def logits(folder: Path, ids: Tensor) -> Tensor:
    """Return the logits of every token, [b, s, V]."""
    found = []
    native = scorer(ONE, folder, [])
    native.module.head.of_logits = lambda rows, targets: found.append(rows) or rows  # type: ignore[func-returns-value]
    native.score(ids, ids, torch.ones_like(ids, dtype=torch.bool))
    return found[0].view(*ids.shape, -1)


def test_logits_equal_those_of_transformers(model: Any, folder: Path) -> None:
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    assert expected.std(1).mean() > 0.5, "logits must depend on the token"
    torch.testing.assert_close(logits(folder, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_logits_of_megatron_weights_equal_those_of_transformers(
    model: Any, tmp_path: Path, version: float
) -> None:
    save_megatron(tmp_path, megatron_ranks(model, 2, 2, version), version)
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(logits(tmp_path, ids), expected, rtol=1e-5, atol=1e-5)


def expected_rows(model: Any) -> list[tuple[int, float, bool, bool]]:
    """Return for each window the loss of transformers, and whether all predictions are correct."""
    found = []
    for number, (begin, length, scored) in enumerate(samples().spans.tolist()):
        text = torch.from_numpy(samples().tokens[begin : begin + length])
        with torch.no_grad():
            rows = model(text[None, :-1]).logits[0, -scored:].double()
        targets = text[-scored:]
        loss = torch.nn.functional.cross_entropy(rows, targets, reduction="sum")
        correct = bool((rows.argmax(1) == targets).all())
        rows[:, FORBIDDEN] = float("-inf")
        found.append((number, float(loss), correct, bool((rows.argmax(1) == targets).all())))
    return found


LAYOUTS = {
    "one": ONE,
    "tp2": Layout(tp=2, micro_batch=2),
    "pp2": Layout(pp=2, micro_batch=2),
    "dp2-zero3": Layout(dp=2, zero=3, micro_batch=2),
    "tp2-dp2-zero3": Layout(tp=2, dp=2, zero=3, micro_batch=1),
    "tp2-pp2": Layout(tp=2, pp=2, micro_batch=3),
    "tp4": Layout(tp=4, micro_batch=3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_of_every_layout_equal_those_of_transformers(
    model: Any, folder: Path, request: pytest.FixtureRequest, name: str
) -> None:
    """Layouts with four tensor-parallel ranks also test padding: 90 tokens become 92, a multiple of four."""
    layout = LAYOUTS[name]
    pool = {1: "", 2: "two", 4: "four"}[layout.world]
    found = [score(layout, folder)] if not pool else request.getfixturevalue(pool).run(score, layout, folder)
    rows = sorted(row for of_rank in found for row in of_rank)
    expected = expected_rows(model)
    assert [row[0] for row in rows] == list(range(len(expected)))
    for row, correct in zip(rows, expected, strict=True):
        assert row[1] == pytest.approx(correct[1], rel=1e-5)
        assert row[2:] == correct[2:]


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


def test_trained_model_has_equal_perplexity_in_transformers(two: RankPool, tmp_path: Path) -> None:
    """The model is trained on two tensor-parallel ranks, exported from its checkpoint, and evaluated in both."""
    trained = experiment(TRAINED["tp2"])
    two.run(train, trained, tmp_path, HALF)
    source = checkpoint(tmp_path, trained)
    export_huggingface(open_weights(source), tmp_path / "out")
    exported = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    ids = tokens(1, LENGTH)[0]
    expected = []
    for begin, length, scored in split_windows(LENGTH, trained.model.seq, STRIDE):
        text = ids[begin : begin + length]
        with torch.no_grad():
            rows = exported(text[None, :-1]).logits[0, -scored:].double()
        expected.append(float(torch.nn.functional.cross_entropy(rows, text[-scored:], reduction="sum")))
    native = [row[1] for row in score(ONE, source)]
    assert native == pytest.approx(expected, rel=1e-6)
    perplexity = [torch.tensor(sum(losses) / (LENGTH - 1)).exp() for losses in (native, expected)]
    assert perplexity[0] == pytest.approx(perplexity[1], rel=1e-6)
