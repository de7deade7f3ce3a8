"""Predicted against measured: the measured runs of a store, predicted on a system file of their machine.

The file comes from `repro calibrate` on that machine, which measures operators, copies and collectives by
themselves; no time of a step with messages enters it, and of one without only where ranks share cores.
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


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One measured experiment and its prediction.  Seconds of a step."""

    name: str
    """`suite/name`."""
    layout: str
    measured: float
    predicted: float
    rests_on: str
    """One of `repro.simulate.time.calibration.BASES`."""

    @property
    def error(self) -> float:
        """Relative, of the seconds; positive where the prediction is too slow."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class MachineErrors:
    """All pairs of a store and a system."""

    system: str
    pairs: tuple[Pair, ...]
    missing: Mapping[str, str]
    """Measured experiments that could not be predicted, and why."""

    @property
    def median(self) -> float:
        """Of the absolute errors."""
        return median(abs(pair.error) for pair in self.pairs)


def compare(records: Iterable[Record], system: System) -> MachineErrors:
    """Predict on `system` every experiment that was measured on the machine at hand and ended ok."""
    from repro.simulate.time.emulated import emulated_system
    from repro.simulate.time.predict import predict
    from repro.simulate.trace.roles import trace_roles

    pairs, missing = [], {}
    gloo = "memory" in system.links
    for record in filter(_measured_here, select(records).measured):
        name = record.at
        experiment = record.experiment
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
        pairs.append(
            Pair(
                name=name,
                layout=words.describe_layout(record.experiment.layout),
                measured=record.metrics[STEP_SECONDS],
                predicted=prediction.step_s,
                rests_on=prediction.rests_on,
            )
        )
    return MachineErrors(system=system.name, pairs=tuple(pairs), missing=missing)


def _measured_here(record: ExperimentRecord) -> bool:
    e = record.experiment
    return (
        record.outcome == "ok"
        and e.system in LOCAL_SYSTEMS
        and e.engine == "native"
        and STEP_SECONDS in record.metrics
    )
