"""What the seconds of a predicted step rest on: how its kernels' speed is known, which decides what they promise."""

from __future__ import annotations

from repro.config import OperatorSet
from repro.config.system import System
from repro.simulate.time.calibration_points import calibration_point_of

CALIBRATED = "calibrated"
PUBLISHED = "published point"
BOUND = "upper bound"
BASES = {
    CALIBRATED: "operators and messages as `repro calibrate` measured them on such a machine",
    PUBLISHED: "kernels as much slower than shapes and bandwidth allow as in one published run of one GPU or node",
    BOUND: "no run calibrates these kernels on this device; they take what shapes and bandwidth allow, and real ones "
    "take longer: a rate at most, a time and a cost at least",
}
"""What each of them means, the firmest first."""


def rests_on(kernels: OperatorSet, system: System) -> str:
    """Which of `BASES` a prediction with these kernels on `system` has."""
    if system.device.operators:
        return CALIBRATED
    return BOUND if calibration_point_of(kernels, system) is None else PUBLISHED


def said(kernels: OperatorSet, system: System) -> str:
    """`rests_on` for people: what it means, and the published point with its source and what the trace lacks of it."""
    basis = rests_on(kernels, system)
    point = calibration_point_of(kernels, system)
    if point is None:
        return f"{basis}; {BASES[basis]}"
    note = f"; {point.note}" if point.note else ""
    return f"{basis}; {BASES[basis]}: {point.name} ({point.source}){note}"
