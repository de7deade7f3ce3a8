"""The search for the largest that fits: it ends at a boundary, in few trials, and names the term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError, Layout, Model, systems
from repro.simulate.plan import fit
from repro.simulate.plan.candidates import LayoutQuery, device_memory_limit
from repro.simulate.plan.fit import FitTrial, _next_index, search_largest

CONTEXT = systems.load_system_file("dgx2").context()


@settings(max_examples=200)
@given(
    count=st.integers(1, 300),
    boundary=st.integers(0, 300),
    curve=st.floats(0.2, 3),
    silent=st.booleans(),
)
def test_search_ends_at_the_boundary(count: int, boundary: int, curve: float, silent: bool) -> None:
    boundary = min(boundary, count)
    tried: list[int] = []

    def attempt(value: int) -> FitTrial:
        tried.append(value)
        fits = value <= boundary
        needed = round(1000 * (value / (boundary + 0.5)) ** curve)
        return FitTrial(value, "ok" if fits else "oom", None if silent and not fits else needed)

    answer = search_largest(range(1, count + 1), attempt, 1000, [3, 6])
    assert (answer.largest.value if answer.largest else 0) == boundary
    assert (answer.first_failing.value if answer.first_failing else count + 1) == boundary + 1
    assert len(tried) == len(set(tried)) <= 20


def test_what_is_known_is_not_tried_again() -> None:
    tried: list[int] = []

    def attempt(value: int) -> FitTrial:
        tried.append(value)
        return FitTrial(value, "ok" if value <= 4 else "oom", 10 * value)

    answer = search_largest(range(1, 100), attempt, 45, [3, 3, 9, 9, 20])
    assert tried[:2] == [3, 9]
    assert len(tried) == len(set(tried))
    assert max(tried) == 9, "nor what is beyond a failure"
    assert answer.largest is not None
    assert answer.largest.value == 4


def test_a_failure_that_is_not_about_memory_ends_the_search() -> None:
    tried: list[int] = []

    def attempt(value: int) -> FitTrial:
        tried.append(value)
        return FitTrial(value, "hang" if value > 4 else "ok", value)

    answer = search_largest(range(1, 100), attempt, 1000, [3, 6])
    assert tried == [3, 6]
    assert answer.first_failing is not None
    assert answer.first_failing.outcome == "hang"


def question(layout: dict[str, Any], limit: int, **sizes: int) -> fit.FitQuestion:
    shape = {"hidden": 256, "heads": 4, "vocab": 512} | sizes
    asked = LayoutQuery("dgx2", 8, layout, seq=64, memory_limit=str(CONTEXT + limit))
    return fit.question_of(systems.load_system_file("dgx2"), asked, None, shape, "layers")


@pytest.mark.parametrize(
    ("layout", "binding"),
    [
        ({"zero": 0}, "optimizer states"),
        ({"zero": 3, "micro_batch": 64}, "activations"),
        ({"zero": 3, "micro_batch": 64, "recompute": True}, "activation checkpoints"),
    ],
)
def test_the_term_that_is_too_much(layout: dict[str, Any], binding: str) -> None:
    asked = question(layout, 250_000_000)
    answer = fit.fit_by_simulation(asked)
    document = fit.fit_document(asked, answer)
    assert document["largest"]["layers"] + 1 == document["first_failing"]["layers"]
    assert (document["largest"]["outcome"], document["first_failing"]["outcome"]) == ("ok", "oom")
    assert document["first_failing"]["largest_term"] == binding
    live = document["first_failing"]["memory"]["peak_bytes"]
    assert document["binding"] == (binding if live > asked.allocatable else "fragmentation")
    assert document["traces"] <= 7
    assert document["largest"]["memory"]["reserved_bytes"] <= asked.allocatable


def test_layers_come_in_multiples_of_the_parts() -> None:
    asked = question({"pp": 2, "schedule": "interleaved", "chunks": 2}, 120_000_000)
    asked = replace(asked, limit=asked.limit + asked.communicators)
    assert asked.layout.accumulation == 2
    answer = fit.fit_by_simulation(asked)
    assert answer.largest is not None
    assert answer.first_failing is not None
    assert answer.largest.value % 4 == 0
    assert answer.first_failing.value == answer.largest.value + 4


def test_the_largest_micro_batch() -> None:
    model = Model(name="m", layers=2, hidden=64, heads=4, vocab=512, seq=64)
    asked = LayoutQuery("dgx2", 2, {"global_batch": 192}, memory_limit=str(CONTEXT + 44_000_000))
    full = fit.question_of(systems.load_system_file("dgx2"), asked, model, {}, "micro-batch")
    assert full.values() == [n for n in range(1, 97) if 96 % n == 0]
    answer = fit.fit_by_simulation(full)
    assert answer.largest is not None
    assert answer.first_failing is not None
    position = list(full.values()).index(answer.largest.value)
    assert full.values()[position + 1] == answer.first_failing.value


def test_nothing_fits() -> None:
    asked = question({}, 3_000_000)
    answer = fit.fit_by_simulation(asked)
    assert answer.largest is None
    assert answer.first_failing is not None
    assert answer.first_failing.value == 1
    assert fit.fit_document(asked, answer)["largest"] is None


def test_bad_questions() -> None:
    with pytest.raises(ConfigError, match=r"heads = 3"):
        question({}, 10**9, heads=3)
    with pytest.raises(ConfigError, match=r"tp = 8: must be a divisor of heads"):
        question({"tp": 8}, 10**9)
    with pytest.raises(ConfigError, match=r"memory_limit: is needed"):
        device_memory_limit(systems.load_system_file("yuan"), None)
    with pytest.raises(ConfigError, match=r"hidden = 64: must be a larger width"):
        fit.fit_by_simulation(question({"zero": 3}, 10**12, hidden=64))


def batches(**layout: Any) -> fit.FitQuestion:
    """The largest micro-batch of twelve samples, in four stages."""
    shape = Layout(pp=4, dp=2, **({"global_batch": 24} | layout))
    small = Model(name="small", layers=8, hidden=256, heads=4, vocab=512, seq=64)
    return fit.FitQuestion(
        small,
        shape,
        systems.load_system_file("dgx2"),
        CONTEXT + 10**9,
        "micro-batch",
        0,
        free_batch=False,
        expandable=False,
    )


def test_a_micro_batch_divides_the_samples_and_stages_the_micro_batches_where_they_are_interleaved() -> None:
    assert batches().values() == [1, 2, 3, 4, 6, 12]
    assert batches(schedule="interleaved", chunks=2).values() == [1, 3]


def test_a_batch_that_was_not_given_grows_with_the_micro_batch() -> None:
    """Three micro-batches of a replica, each of so many samples; where it was given it stays."""
    given = batches(micro_batch=4)
    tried = replace(given, free_batch=True).experiment(5).layout
    assert (tried.micro_batch, tried.global_batch, tried.accumulation) == (5, 2 * 3 * 5, 3)
    tried = given.experiment(6).layout
    assert (tried.micro_batch, tried.global_batch, tried.accumulation) == (6, 24, 2)


def test_a_single_micro_batch_is_tried_alone() -> None:
    answer = fit.fit_by_simulation(batches(global_batch=2))
    assert [trial.value for trial in answer.trials] == [1]
    assert answer.first_failing is None


def trial(value: int, needed: int | None) -> FitTrial:
    return FitTrial(value=value, outcome="ok", needed=needed)


@pytest.mark.parametrize(
    ("found", "low", "high", "index"),
    [
        ({}, -1, 100, 0),  # nothing known: the smallest
        ({}, 0, 100, 1),  # it fits: on in strides that double
        ({}, 7, 100, 15),
        ({}, 60, 100, 99),
        ({}, 10, 21, 15),  # between what fits and what does not, which say nothing: the middle
        # 10 bytes for 0 and 30 for 20: 24 bytes are enough for 14.
        ({0: trial(0, 10), 20: trial(20, 30)}, 0, 20, 14),
        ({0: trial(0, 10), 20: trial(20, 30)}, 14, 20, 17),
    ],
)
def test_where_a_fit_looks_next(found: dict[int, FitTrial], low: int, high: int, index: int) -> None:
    assert _next_index(range(100), found, 24, low, high) == index
