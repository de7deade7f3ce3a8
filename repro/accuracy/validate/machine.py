"""Measured against predicted step times: runs of a store, predicted on a system file of their machine.

`repro calibrate` writes that file from measurements of operators, copies and collectives, without timing a step with
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from repro.config import words
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.config.systems import LOCAL_SYSTEMS
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import select


@dataclass(frozen=True)
class Pair:
    """Measured and predicted step time of one experiment, in seconds."""

    name: str
    """`suite/name`."""
    layout: str
    measured: float
    predicted: float
    rests_on: str
    """One of `repro.simulate.time.calibration.BASES`."""

    @property
    def error(self) -> float:
        """Return the relative error of the seconds; positive if the prediction is too slow."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class MachineErrors:
    """Pairs of a store and a system."""

    system: str
    pairs: tuple[Pair, ...]
    missing: Mapping[str, str]
    """Measured experiments without a prediction, and the reason."""

    @property
    def median(self) -> float:
        """Return the median of the absolute errors."""
        return median(abs(pair.error) for pair in self.pairs)


def predict_measured_runs(records: Iterable[Record], system: System) -> MachineErrors:
    """Predict on `system` every successful experiment that was measured on this machine."""
    from repro.simulate.time.emulated import emulated_system
    from repro.simulate.time.predict import predict
    from repro.simulate.trace.roles import trace_roles

    pairs, missing = [], {}
    gloo = "memory" in system.links
    for record in filter(_measured_here, select(records).measured):
        name, experiment = record.label, record.experiment
        ranks = experiment.layout.world
        if system.provenance is not None and system.provenance.ranks != ranks:
            missing[name] = f"it has {ranks} ranks, {system.name} was measured with {system.provenance.ranks}"
            continue
        try:
            on = system
            if experiment.network and record.network:
                on = emulated_system(system, record.network.made(experiment.network))
            prediction = predict(experiment, on, trace_roles(experiment, gloo=gloo))
        except ConfigError as error:
            missing[name] = str(error)
            continue
        layout, measured = words.describe_layout(experiment.layout), record.metrics[STEP_SECONDS]
        pairs.append(Pair(name, layout, measured, prediction.step_s, prediction.rests_on))
    return MachineErrors(system=system.name, pairs=tuple(pairs), missing=missing)


def _measured_here(record: ExperimentRecord) -> bool:
    e, is_timed = record.experiment, record.outcome == "ok" and STEP_SECONDS in record.metrics
    return is_timed and e.system in LOCAL_SYSTEMS and e.engine == "native"
