"""Shallow traces extended along straight lines say what full traces say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.simulate.plan.closed_form import (
    LAST,
    exceeding_states,
    stage_parameters,
    state_bytes,
    suggested_width,
)
from repro.simulate.plan.extrapolation import linear
from repro.simulate.plan.extrapolation.shallow_traces import micro_batches_in_flight
from repro.simulate.step import simulate
from tests.simulate.families import families_of

MODEL = Model(name="small", layers=12, hidden=128, heads=4, vocab=512, seq=64)
BASE = Layout(dp=8, micro_batch=2, global_batch=192, precision="fp16", bucket_bytes=200_000)
LAYOUTS = {
    **{f"z{z}": replace(BASE, zero=z) for z in range(4)},
    "z1-recompute": replace(BASE, zero=1, recompute=True, micro_batch=4, global_batch=128),
    "tp2-sp": replace(BASE, tp=2, sp=True, zero=1),
    "tp2-pa": replace(BASE, tp=2, recompute=True, pa=True, zero=2),
    "cp4-z3": replace(BASE, cp=4, dp=2, zero=3, recompute=True, global_batch=48),
    "cp2-tp2-sp": replace(BASE, cp=2, tp=2, sp=True, dp=2, zero=1, global_batch=48),
    "cp2-pp3": replace(BASE, pp=3, cp=2, dp=2, zero=1, micro_batch=1, global_batch=48),
    "pp3": replace(BASE, pp=3, dp=4, zero=1, micro_batch=1),
    "pp6-tp2": replace(BASE, pp=6, tp=2, dp=2, recompute=True),
    "interleaved": replace(BASE, pp=2, dp=4, schedule="interleaved", chunks=2, recompute=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_estimates_are_full_traces(name: str) -> None:
    layout = LAYOUTS[name]
    system = systems.load_system_file("dgx1-v100-16gb")
    families, traces = families_of(MODEL, layout)
    assert traces <= 11
    roles = linear.estimate_memory(MODEL, layout, families)
    sent = linear.estimate_traffic(MODEL, layout, families, system)
    full = simulate(Experiment(name="x", model=MODEL, layout=layout), system)
    by_name = {role.role.name.partition(" (")[0]: role for role in full.roles}
    for role, found in roles.items():
        memory = by_name[role].memory
        assert found.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.03)
        assert found.states_bytes == pytest.approx(memory.states_bytes, rel=1e-3)
    for role, found in by_name.items():
        groups: dict[str, int] = {}
        links: dict[str, int] = {}
        for row in found.traffic:
            groups[row.group] = groups.get(row.group, 0) + row.sent_bytes
            links[row.link] = links.get(row.link, 0) + row.sent_bytes
        big = {group for group, size in groups.items() if size > 100}
        assert set(sent[role].by_group) >= big
        for group in big:
            assert sent[role].by_group[group] == pytest.approx(groups[group], rel=2e-3)
        assert sum(sent[role].by_link.values()) == pytest.approx(sum(links.values()), rel=2e-3)
        assert set(sent[role].by_link) == set(links)


@pytest.mark.parametrize("name", ["z0", "z3", "pp6-tp2"])
def test_of_the_shallow_traces_themselves_nothing_is_lost(name: str) -> None:
    """With as many layers and samples as were traced, to the byte."""
    families, _ = families_of(MODEL, LAYOUTS[name])
    for role, family in families.items():
        for profile in (family.base, family.wider):
            model = replace(MODEL, layers=profile.layers * profile.layout.pp)
            found = linear.estimate_memory(model, profile.layout, families).get(role)
            if found is None:  # the stages between first and last
                continue
            moments = [moment for phase in profile.live.values() for moment in phase]
            fullest = max(moments, key=lambda moment: sum(moment.values()))
            assert found.peak_bytes == sum(fullest.values())
            assert {key: size for key, size in found.by_category.items() if size} == {
                key: size for key, size in fullest.items() if size
            }


WIDE = Model(name="wide", layers=24, hidden=1024, heads=16, vocab=51200, seq=1024)
UNDER_WAY = {
    # Parameters of three blocks: traced with two layers, a deeper model would seem to hold a tenth less.
    "z3-recompute": (MODEL, replace(BASE, zero=3, recompute=True), 1e-3),
    # Gradients on their way through a bucket of about a block: two layers a stage would say 3.6 % too much.
    "pp3-z2": (WIDE, replace(BASE, pp=3, dp=4, zero=2, micro_batch=1, bucket_bytes=25_000_000), 0.02),
}


@pytest.mark.parametrize("name", UNDER_WAY)
def test_shallow_traces_hold_all_that_is_under_way_at_once(name: str) -> None:
    model, layout, room = UNDER_WAY[name]
    families, _ = families_of(model, layout, layout.micro_batch, layout.micro_batch)
    full = simulate(Experiment(name="x", model=model, layout=layout), systems.load_system_file("dgx2"))
    by_name = {role.role.name.partition(" (")[0]: role.memory.peak_bytes for role in full.roles}
    for role, found in linear.estimate_memory(model, layout, families).items():
        assert found.peak_bytes == pytest.approx(by_name[role], rel=room)


def test_closed_form_is_what_is_traced() -> None:
    system = systems.load_system_file("dgx2")
    for layout in (LAYOUTS["z2"], LAYOUTS["pp6-tp2"], replace(BASE, tp=4, precision="fp32")):
        full = simulate(Experiment(name="x", model=MODEL, layout=layout), system)
        parameters = stage_parameters(MODEL, layout)
        for role in full.roles:
            if role.role.name in parameters:
                assert parameters[role.role.name] == role.parameters
                states = state_bytes(role.parameters, layout)
                for category, size in states.items():
                    assert role.memory.states[category] == pytest.approx(size, rel=5e-3)


def test_what_model_states_alone_rule_out() -> None:
    model = Model(name="b", layers=78, hidden=4256, heads=32, vocab=51200, seq=1024)
    plain = Layout(tp=8, dp=64, precision="fp16")
    term, states = exceeding_states(model, plain, 32 * 10**9) or ("", {})
    assert term == "optimizer"
    assert sum(states.values()) == pytest.approx(17.18e9 * 16 / 8, rel=0.005)
    assert exceeding_states(model, replace(plain, zero=1), 32 * 10**9) is None
    assert exceeding_states(model, replace(plain, tp=16), 32 * 10**9) is None


def test_suggested_widths_have_the_shape_of_the_papers_models() -> None:
    """1910.02054 Table 4: 8B of 3072, 100B of 8192."""
    zero1 = Layout(dp=64, zero=1, precision="fp16")
    assert suggested_width(32 * 10**9, 1, zero1) == 3072
    assert suggested_width(32 * 10**9, 16, replace(zero1, tp=16)) == 8192


def test_kept_micro_batches_are_the_schedules() -> None:
    from repro.parallel.pipeline.schedule import build_schedule, in_flight

    for layout in (
        replace(BASE, pp=3, dp=4),
        replace(BASE, pp=3, dp=4, schedule="gpipe"),
        replace(BASE, pp=3, dp=4, schedule="interleaved", chunks=2),
        replace(BASE, pp=6, dp=96, micro_batch=1),
    ):
        actions = build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        assert [micro_batches_in_flight(layout, stage) for stage in range(layout.pp)] == [
            in_flight(a) for a in actions
        ]
    assert LAST in stage_parameters(MODEL, replace(BASE, pp=3, dp=4))
