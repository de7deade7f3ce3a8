"""Tests that the recurrence over actions gives the times of the event-level schedule, for random layouts."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from repro.config import Experiment, Layout, Model, systems
from repro.config.errors import ConfigError
from repro.config.systems.unknowns import drawn, quantiles_in_cases, unknowns
from repro.simulate.time.device import MODELLED_KERNELS
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.time.stage import StageStreams
from repro.simulate.trace.roles import trace_roles

MODEL = Model(name="tiny", layers=8, hidden=64, heads=8, vocab=256, seq=32)
SELENE = systems.load_system_file("selene")


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    pp = draw(st.sampled_from([1, 2, 4]))
    tp, cp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]))
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"])) if pp > 1 else "1f1b"
    dp = draw(st.sampled_from([1, 2, 4]))
    micro_batches = draw(st.sampled_from([1, 2, 9 if name == "interleaved" else 5]))
    degrees = {"dp": dp, "tp": tp, "cp": cp, "pp": pp}
    uneven = name != "interleaved" and pp == 4 and draw(st.booleans())
    try:
        layout = Layout(
            **degrees,
            schedule=name,
            chunks=2 if name == "interleaved" else 1,
            stage_layers=(1, 3, 2, 2) if uneven else (),
            zero=draw(st.sampled_from([0, 1, 2, 3])),
            sp=tp > 1 and draw(st.booleans()),
            scatter_gather=tp > 1 and pp > 1 and draw(st.booleans()),
            recompute=draw(st.booleans()),
            overlap=draw(st.booleans()),
            tp_overlap=draw(st.booleans()),
            micro_batch=1,
            global_batch=dp * micro_batches * pp,
        )
        return Experiment(name="random", model=MODEL, layout=layout, system="selene")
    except ConfigError:
        reject()


@settings(max_examples=40)
@given(experiments())
def test_the_recurrence_equals_the_event_level_schedule(experiment: Experiment) -> None:
    """The breakdowns are equal, and so are the step times with other values of uncertain inputs."""
    try:
        traces = trace_roles(experiment)
    except ConfigError:
        reject()
    cases = drawn(SELENE, quantiles_in_cases(unknowns(SELENE)))
    with mock.patch.object(StageStreams, "run_events", side_effect=AssertionError("events were scheduled")):
        found = schedule_traces(experiment, SELENE, traces, MODELLED_KERNELS)
        in_cases = schedule_traces(experiment, cases, traces, MODELLED_KERNELS).seconds
    expected = schedule_traces(experiment, SELENE, traces, MODELLED_KERNELS, record=True)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)
    assert found.unmatched == expected.unmatched
    tolerance = 1e-9 * float(expected.step_s)
    for mine, its in zip(found.stages, expected.stages, strict=True):
        assert mine.bubble == pytest.approx(its.bubble, rel=1e-9, abs=tolerance)
        for table in ("busy", "exposed", "communication", "by_phase"):
            ours, theirs = Counter(getattr(mine, table)), Counter(getattr(its, table))
            for key in ours | theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9, abs=tolerance), key
    by_events = schedule_traces(experiment, cases, traces, MODELLED_KERNELS, record=True)
    assert in_cases == pytest.approx(by_events.seconds, rel=1e-9)
