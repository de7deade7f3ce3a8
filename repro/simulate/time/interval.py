"""What a predicted step may take instead, since numbers of its system are not known for certain.

A step is traced once and timed for every case: each unknown at both ends of its range, all others at their best values
(which one moves it how far), and joint draws of all of them (how far it may be off).  The factor of a generation's
kernels follows from its published point in the same case: a device that is slower than it is taken for has kernels that
are as much nearer to it, and what the point fixes is not doubted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from repro.config import Experiment
from repro.config.system import System
from repro.config.systems.unknowns import HIGH, JOINT, LOW, Case, Unknown, drawn
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.time import efficiency
from repro.simulate.time.calibration_points import CalibrationPoint, calibration_point_of
from repro.simulate.time.device import Kernels
from repro.simulate.time.timed import step_seconds
from repro.simulate.time.uncertain import UNCALIBRATED, uncertain
from repro.simulate.trace.roles import Trace

DIGITS = 7
"""That are kept of seconds."""


def interval(experiment: Experiment, system: System, traces: list[Trace]) -> StepInterval | None:
    """The interval of the seconds of a step that `traces` have all roles of; None where nothing is unknown."""
    found = uncertain(system, calibration_point_of(experiment.layout.kernels, system))
    if not found:
        return None
    return of_seconds(found, in_cases(experiment, system, traces, all_cases(found)))


def in_cases(
    experiment: Experiment, system: System, traces: list[Trace], cases: Sequence[Case]
) -> Sequence[float]:
    """The seconds of a step in each of `cases`, all in one pass."""
    systems, kernels = at(system, calibration_point_of(experiment.layout.kernels, system), cases)
    return step_seconds(experiment, systems, traces, kernels).tolist()


def rounded(seconds: float) -> float:
    """As a record has it."""
    return float(f"{seconds:.{DIGITS}g}")


def all_cases(found: Sequence[Unknown]) -> tuple[Case, ...]:
    """Both ends of each unknown, then the joint draws."""
    return (*(Case(one.key, end) for one in found for end in (LOW, HIGH)), *JOINT)


def at(
    system: System, generation: CalibrationPoint | None, cases: Sequence[Case]
) -> tuple[list[System], Sequence[Kernels]]:
    """The system and its kernels in each of `cases`."""
    systems = [drawn(system, case) for case in cases]
    if generation is not None:
        doubted = frozenset(one.key for one in uncertain(system, generation))
        return systems, efficiency.kernels_in(generation, tuple(cases), doubted)
    return systems, [Kernels.alike(UNCALIBRATED.at(case.of(UNCALIBRATED.key))) for case in cases]


def of_seconds(found: Sequence[Unknown], seconds: Sequence[float]) -> StepInterval:
    """The interval from the seconds in `all_cases(found)`."""
    kept = iter(map(rounded, seconds))
    moves = [
        Sensitivity(
            key=one.key, low=one.low, best=one.best, high=one.high, low_s=next(kept), high_s=next(kept)
        )
        for one in found
    ]
    moving = [move for move in moves if move.span > 0]
    moving.sort(key=lambda move: -move.span)
    return StepInterval(draws=list(islice(kept, len(JOINT))), moves=moving)
