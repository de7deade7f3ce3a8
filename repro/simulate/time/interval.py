"""What a predicted step may take instead, since numbers of its system are not known for certain.

A step is traced once and timed for every case: each unknown at both ends of its range, all others at their best values
(which one moves it how far), and joint draws of all of them (how far it may be off).  The factor of a generation's
kernels follows from its published point in the same case: a device that is slower than it is taken for has kernels that
are as much nearer to it, and what the point fixes is not doubted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from repro.config import Experiment
from repro.config.system import System
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.time import efficiency
from repro.simulate.time.calibration_points import CalibrationPoint, calibration_point_of
from repro.simulate.time.timed import step_seconds
from repro.simulate.time.uncertain import UNCALIBRATED, uncertain
from repro.simulate.trace.roles import Trace
from repro.systems.unknowns import HIGH, JOINT, LOW, Case, Unknown, drawn

DIGITS = 7
"""That are kept of seconds."""
MOVES = 0.01
"""Part of a step that an unknown moves at least whose seconds are looked for outside of its range as well."""


def interval(experiment: Experiment, system: System, traces: list[Trace]) -> StepInterval | None:
    """The interval of the seconds of a step that `traces` have all roles of; None where nothing is unknown."""
    generation = calibration_point_of(experiment.layout.kernels, system)
    found = uncertain(system, generation)
    if not found:
        return None
    cases = all_cases(found)

    def seconds(asked: Sequence[Case]) -> list[float]:
        systems, factors = at(system, generation, asked)
        return step_seconds(experiment, systems, traces, factors).tolist()

    made = of_seconds(found, seconds(cases))
    moving = {move.key for move in made.moves if move.span > MOVES * min(move.low_s, move.high_s)}
    around = [
        (one.key, value, quantile)
        for one in found
        if one.key in moving
        for value, quantile in one.around.items()
    ]
    curves: dict[str, list[list[float]]] = {key: [] for key in moving}
    at_once = max(1, len(cases) // 2)  # seconds are held for every message, beside those of the first pass
    for start in range(0, len(around), at_once):
        part = around[start : start + at_once]
        taken = seconds([Case(key, quantile) for key, _, quantile in part])
        for (key, value, _), one in zip(part, taken, strict=True):
            curves[key].append([_rounded(value), _rounded(one)])
    return replace(
        made,
        moves=[replace(move, curve=curves[move.key]) if move.key in moving else move for move in made.moves],
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def all_cases(found: Sequence[Unknown]) -> tuple[Case, ...]:
    """Both ends of each unknown, then the joint draws."""
    return (*(Case(one.key, end) for one in found for end in (LOW, HIGH)), *JOINT)


def at(
    system: System, generation: CalibrationPoint | None, cases: Sequence[Case]
) -> tuple[list[System], Sequence[float]]:
    """The system and the kernels' factor in each of `cases`."""
    systems = [drawn(system, case) for case in cases]
    if generation is not None:
        return systems, efficiency.factors(generation, tuple(cases))
    return systems, [UNCALIBRATED.at(case.of(UNCALIBRATED.key)) for case in cases]


def of_seconds(found: Sequence[Unknown], seconds: Sequence[float]) -> StepInterval:
    """The interval from the seconds in `all_cases(found)`."""
    rounded = iter(map(_rounded, seconds))
    moves = [
        Sensitivity(
            key=one.key, low=one.low, best=one.best, high=one.high, low_s=next(rounded), high_s=next(rounded)
        )
        for one in found
    ]
    moving = [move for move in moves if move.span > 0]
    moving.sort(key=lambda move: -move.span)
    return StepInterval(draws=list(islice(rounded, len(JOINT))), moves=moving)
