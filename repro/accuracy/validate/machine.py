"""Errors of predicted step times against runs on this machine, for which `repro calibrate` has written a system file.

The calibration times operators, copies and collectives, but no step with messages.
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
from repro.results.schema import Record
from repro.results.select import select


@dataclass(frozen=True)
class Pair:
    """Measured and predicted step time of one experiment, in seconds."""

    name: str
    """Experiment as `suite/name`."""
    layout: str
    measured: float
    predicted: float
    rests_on: str
    """Calibration of the predicted step time, such as by measurements of this machine or by a published run."""

    @property
    def error(self) -> float:
        """Return the step time's relative error, predicted / measured - 1; positive if the prediction is slower."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class MachineErrors:
    """Measured step times of all runs in a store of results, and the step times predicted on one system."""

    system: str
    pairs: tuple[Pair, ...]
    missing: Mapping[str, str]
    """Reason why a measured experiment has no prediction, by experiment."""

    @property
    def median(self) -> float:
        """Return the median absolute relative error of the predicted step times."""
        return median(abs(pair.error) for pair in self.pairs)


def predict_measured_runs(records: Iterable[Record], system: System) -> MachineErrors:
    """Return step times predicted on `system` for all successful native runs on this machine in `records`."""
    from repro.simulate.time.emulated import emulated_system
    from repro.simulate.time.predict import predict
    from repro.simulate.trace.roles import trace_roles

    pairs, missing = [], {}
    gloo = "memory" in system.links
    for record in select(records).measured:
        name, experiment = record.label, record.experiment
        is_timed = record.outcome == "ok" and STEP_SECONDS in record.metrics
        if not is_timed or experiment.system not in LOCAL_SYSTEMS or experiment.engine != "native":
            continue
        ranks = experiment.layout.world
        if system.provenance is not None and system.provenance.ranks != ranks:
            calibrated = f"{system.name} was calibrated with {system.provenance.ranks} ranks"
            missing[name] = f"the run has {ranks} ranks, but {calibrated}"
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
