"""Predicted against measured: the measured runs of a store, predicted on a system file of their machine.

The file comes from `repro calibrate` on that machine, which measures operators, copies and collectives by
themselves; no time of a step enters it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from repro.config.errors import ConfigError
from repro.config.experiment import PROTOCOL, from_dict
from repro.config.system import System
from repro.render import words
from repro.results.store import CONCLUSIVE, SIMULATED
from repro.systems import HERE

STEP = "step_seconds.median"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One measured experiment and its prediction.  Seconds of a step."""

    name: str
    """`suite/name`."""
    layout: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, of the seconds; positive where the prediction is too slow."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All pairs of a store and a system."""

    system: str
    pairs: tuple[Pair, ...]
    missing: Mapping[str, str]
    """Measured experiments that could not be predicted, and why."""

    @property
    def median(self) -> float:
        """Of the absolute errors."""
        return median(abs(pair.error) for pair in self.pairs)


def compare(records: Iterable[Mapping[str, Any]], system: System) -> Machine:
    """Predict on `system` every experiment that was measured on the machine at hand and ended ok."""
    from repro.simulate.time.predict import predict
    from repro.simulate.trace.roles import trace_roles

    newest: dict[str, Mapping[str, Any]] = {}
    for record in sorted(records, key=lambda record: str(record.get("written", ""))):
        if _measured_here(record):
            newest[f"{record['suite']}/{record['name']}"] = record
    pairs, missing = [], {}
    gloo = "memory" in system.links
    for name, record in sorted(newest.items()):
        experiment = replace(from_dict(record["experiment"]), system=system.name)
        ranks = experiment.layout.world
        if system.provenance is not None and system.provenance.ranks != ranks:
            missing[name] = f"it has {ranks} ranks, {system.name} was measured with {system.provenance.ranks}"
            continue
        try:
            seconds = predict(experiment, system, trace_roles(experiment, gloo=gloo)).seconds
        except ConfigError as error:
            missing[name] = str(error)
            continue
        pairs.append(
            Pair(
                name=name,
                layout=words.layout(record["experiment"]["layout"]),
                measured=record["metrics"][STEP],
                predicted=seconds,
            )
        )
    return Machine(system=system.name, pairs=tuple(pairs), missing=missing)


def _measured_here(record: Mapping[str, Any]) -> bool:
    return (
        record.get("kind") == "experiment"
        and record.get("protocol") == PROTOCOL
        and record.get("evidence") != SIMULATED
        and record.get("outcome") in CONCLUSIVE
        and record["outcome"] == "ok"
        and record["experiment"]["system"] in HERE
        and record["experiment"]["engine"] == "native"
        and STEP in record["metrics"]
    )
