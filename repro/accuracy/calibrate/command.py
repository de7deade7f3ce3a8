"""One calibration: check what is asked, start the ranks, write the file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.accuracy.calibrate import plan, toml
from repro.accuracy.calibrate.document import tables
from repro.accuracy.calibrate.machines import TWIN_TARGET, Here, Machine, Nodes, facts
from repro.config.errors import ConfigError, require
from repro.config.files import check_writable
from repro.config.suites import load_suite
from repro.config.systems import parse_system, system_names
from repro.launch.job import Interrupt, Job
from repro.util import files


@dataclass(frozen=True)
class Calibrated:
    """How a calibration ended, and what it wrote if it ended well."""

    outcome: str
    """`ok`, or as an experiment fails."""
    reason: str
    signal: int
    """The one that stopped it, 0 for none."""
    seconds: float
    path: Path
    document: dict[str, Any] = field(default_factory=dict)
    """The system file's tables."""


def calibrate(
    system: str,
    gpus: int,
    output: Path | None,
    profile: Path | None,
    nodes: int,
    quick: bool,
    suites: Sequence[Path] = (),
    *,
    quiet: bool,
) -> Calibrated:
    """Measure this machine, or nodes of a cluster with a `profile`, and write a system file.

    `gpus`: ranks, of each node.  `suites`: in place of steps of usual sizes those of these files, for twins on
    emulated networks, of whose links only single messages are measured.  `quiet`: nothing is said on standard
    error.  Raises `ConfigError`.
    """
    path = _checked(output or Path(f"{system}-calibrated.toml"))
    if profile is None and nodes:
        raise ConfigError("--nodes", nodes, says="needs --profile, whose cluster has them")
    if profile is not None and suites:
        right = "goes without --profile: a twin runs on this machine"
        raise ConfigError("--suite", str(suites[0]), says=right)
    machine: Machine = (
        Here(system, gpus, target=TWIN_TARGET if suites else "")
        if profile is None
        else Nodes(system, profile, nodes or 1, gpus, path)
    )
    if suites:
        experiments = plan.of_suites(list(map(load_suite, suites)), machine.system, machine.ranks, quick)
    else:
        experiments = plan.experiments(
            machine.system, machine.ranks, machine.precision, quick, per_node=machine.per_node
        )
    began = time.perf_counter()
    with Interrupt() as interrupt:
        answer = machine.measure(Job(experiments=experiments), interrupt, quiet=quiet)
    document: dict[str, Any] = {}
    if answer["outcome"] == "ok" and not interrupt:
        document = tables(
            system,
            machine.precision,
            answer["results"],
            repeats=experiments[0].training.steps,
            load=answer["load"],
            quick=quick,
            site=facts(answer["place"]) if "place" in answer else None,
        )
        parse_system(document, name=path.stem, file=str(path))
        files.replace_file(path, toml.text(document))
    seconds = round(time.perf_counter() - began, 1)
    return Calibrated(answer["outcome"], answer.get("reason", ""), interrupt.signal, seconds, path, document)


def _checked(path: Path) -> Path:
    """`path`, or the error that would come after the minute that measuring takes."""
    require(path.suffix == ".toml", "--output", str(path), "a file that ends in .toml")
    require(
        path.stem not in system_names(),
        "--output",
        str(path),
        f"a file that is not called as the packaged system {path.stem}",
    )
    check_writable("--output", path)
    return path
