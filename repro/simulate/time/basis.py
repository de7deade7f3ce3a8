"""What the seconds of a predicted step rest on: how its kernels' speed is known, which decides what they promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from repro.config import OperatorSet
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.measure.local_system import load_system
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import SIMULATED, ExperimentRecord
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
SHORT = {CALIBRATED: "calibrated", PUBLISHED: "published", BOUND: "bound", "": "–"}
"""One word each, for a column; of what is not predicted, nothing."""


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


def of_record(record: ExperimentRecord) -> str:
    """`rests_on` of a record's predicted speed; empty where it has none, or where the system's file has gone."""
    if record.evidence != SIMULATED or record.outcome != "ok" or STEP_SECONDS not in record.metrics:
        return ""
    try:
        return rests_on(record.experiment.layout.kernels, load_system(record.experiment.system))
    except ConfigError:
        return ""


def weakest(bases: Iterable[str]) -> str:
    """The one of `BASES` on which all of what is made of several predictions can rest; empty for none."""
    return max(filter(None, bases), key=list(BASES).index, default="")


def counted(bases: Iterable[str]) -> str:
    """How many predictions rest on what: `Times rest on: published point (7), upper bound (1).`; empty for none."""
    found = Counter(filter(None, bases))
    parts = ", ".join(f"{basis} ({found[basis]})" for basis in BASES if found[basis])
    return f"Times rest on: {parts}." if parts else ""
