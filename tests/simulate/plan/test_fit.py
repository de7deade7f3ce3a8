"""Tests of the search for the largest value that fits: the boundary, few trials, and the binding term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError, Layout, Model, systems
from repro.simulate.plan import fit
from repro.simulate.plan.candidates import LayoutQuery, device_memory_limit
from repro.simulate.plan.fit import FitTrial, search_largest

DGX2 = systems.load_system_file("dgx2")
CONTEXT = DGX2.context()


@settings(max_examples=200)
@given(
    count=st.integers(1, 300),
    boundary=st.integers(0, 300),
    curve=st.floats(0.2, 3),
    unknown_bytes=st.booleans(),
    start=st.sampled_from([[3, 6], [3, 3, 9, 9, 20]]),
)
def test_search_ends_at_the_boundary(
    count: int, boundary: int, curve: float, unknown_bytes: bool, start: list[int]
) -> None:
    """No value is tried twice, and none above a value that failed."""
    boundary = min(boundary, count)
    tried: list[int] = []

    def attempt(value: int) -> FitTrial:
        assert all(value < failed for failed in tried if failed > boundary)
        tried.append(value)
        fits = value <= boundary
        needed = round(1000 * (value / (boundary + 0.5)) ** curve)
        return FitTrial(value, "ok" if fits else "oom", None if unknown_bytes and not fits else needed)

    answer = search_largest(range(1, count + 1), attempt, 1000, start)
    assert tried[0] == 3 or count < 3
    assert (answer.largest.value if answer.largest else 0) == boundary
    assert (answer.first_failing.value if answer.first_failing else count + 1) == boundary + 1
    assert len(tried) == len(set(tried)) <= 20


@pytest.mark.parametrize(
    ("boundary", "tried"), [(11, [12, 11]), (9, [12, 11, 9, 10]), (14, [12, 13, 15, 14])]
)
def test_a_nearly_correct_start_needs_few_trials_without_byte_counts(boundary: int, tried: list[int]) -> None:
    """Trials on processors do not report the bytes that they need."""
    answer = search_largest(
        range(1, 1001), lambda value: FitTrial(value, "ok" if value <= boundary else "oom", None), 0, [12, 13]
    )
    assert [trial.value for trial in answer.trials] == tried
    assert answer.largest.value == boundary


def test_a_hang_ends_the_search() -> None:
    answer = search_largest(
        range(1, 100), lambda value: FitTrial(value, "hang" if value > 4 else "ok", value), 1000, [3, 6]
    )
    assert [trial.value for trial in answer.trials] == [3, 6]
    assert answer.first_failing.outcome == "hang"


def layer_question(layout: dict[str, Any], limit: int, **sizes: int) -> fit.FitQuestion:
    shape = {"hidden": 256, "heads": 4, "vocab": 512} | sizes
    query = LayoutQuery("dgx2", 8, layout, seq=64, memory_limit=str(CONTEXT + limit))
    return fit.question_of(DGX2, query, None, shape, "layers")


@pytest.mark.parametrize(
    ("layout", "binding"),
    [
        ({"zero": 0}, "optimizer states"),
        ({"zero": 3, "micro_batch": 64}, "activations"),
        ({"zero": 3, "micro_batch": 64, "recompute": True}, "activation checkpoints"),
    ],
)
def test_the_binding_term_is_the_largest_term_or_fragmentation(layout: dict[str, Any], binding: str) -> None:
    question = layer_question(layout, 250_000_000)
    answer = fit.fit_by_simulation(question)
    document = fit.fit_document(question, answer)
    largest, failing = document["largest"], document["first_failing"]
    assert largest["layers"] + 1 == failing["layers"]
    assert (largest["outcome"], failing["outcome"], failing["largest_term"]) == ("ok", "oom", binding)
    live = failing["memory"]["peak_bytes"]
    assert document["binding"] == (binding if live > question.allocatable else "fragmentation")
    assert document["traces"] <= 7
    assert largest["memory"]["reserved_bytes"] <= question.allocatable


def test_the_layer_count_is_a_multiple_of_all_chunks() -> None:
    question = layer_question({"pp": 2, "schedule": "interleaved", "chunks": 2}, 120_000_000)
    question = replace(question, limit=question.limit + question.communicators)
    assert question.layout.accumulation == 2
    answer = fit.fit_by_simulation(question)
    assert answer.largest.value % 4 == 0
    assert answer.first_failing.value == answer.largest.value + 4


def test_the_next_divisor_after_the_largest_micro_batch_fails() -> None:
    model = Model(name="m", layers=2, hidden=64, heads=4, vocab=512, seq=64)
    query = LayoutQuery("dgx2", 2, {"global_batch": 192}, memory_limit=str(CONTEXT + 44_000_000))
    micro_batches = fit.question_of(DGX2, query, model, {}, "micro-batch")
    sizes = micro_batches.values()
    assert sizes == [n for n in range(1, 97) if 96 % n == 0]
    answer = fit.fit_by_simulation(micro_batches)
    assert sizes[sizes.index(answer.largest.value) + 1] == answer.first_failing.value


def test_a_fit_without_a_fitting_value_has_no_largest() -> None:
    question = layer_question({}, 3_000_000)
    answer = fit.fit_by_simulation(question)
    assert (answer.largest, answer.first_failing.value) == (None, 1)
    assert fit.fit_document(question, answer)["largest"] is None


def test_invalid_questions_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"heads = 3"):
        layer_question({}, 10**9, heads=3)
    with pytest.raises(ConfigError, match=r"tp = 8: must be a divisor of heads"):
        layer_question({"tp": 8}, 10**9)
    with pytest.raises(ConfigError, match=r"memory_limit: is needed"):
        device_memory_limit(systems.load_system_file("yuan"), None)
    with pytest.raises(ConfigError, match=r"hidden = 64: must be a larger width"):
        fit.fit_by_simulation(layer_question({"zero": 3}, 10**12, hidden=64))


def micro_batch_question(**layout: Any) -> fit.FitQuestion:
    """Return the question for the largest micro-batch of a replica with twelve samples and four stages."""
    shape = Layout(pp=4, dp=2, **({"global_batch": 24} | layout))
    small = Model(name="small", layers=8, hidden=256, heads=4, vocab=512, seq=64)
    return fit.FitQuestion(
        small, shape, DGX2, CONTEXT + 10**9, "micro-batch", 0, free_batch=False, expandable=False
    )


def test_a_free_global_batch_grows_with_the_micro_batch() -> None:
    """A replica has three micro-batches of each tried size. A given global batch does not change."""
    given = micro_batch_question(micro_batch=4)
    for question, size, batch in ((replace(given, free_batch=True), 5, 2 * 3 * 5), (given, 6, 24)):
        tried = question.experiment(size).layout
        assert (tried.micro_batch, tried.global_batch) == (size, batch)


def test_micro_batches_divide_a_replica_with_all_stages_of_an_interleaved_schedule() -> None:
    """The only possible micro-batch needs one trial."""
    assert micro_batch_question().values() == [1, 2, 3, 4, 6, 12]
    assert micro_batch_question(schedule="interleaved", chunks=2).values() == [1, 3]
    answer = fit.fit_by_simulation(micro_batch_question(global_batch=2))
    assert ([trial.value for trial in answer.trials], answer.first_failing) == ([1], None)
