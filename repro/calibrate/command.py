"""`repro calibrate`: check what is asked, start the ranks, write the file, say what came out."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from repro.calibrate import plan, toml
from repro.calibrate.document import tables
from repro.calibrate.machines import Here, Machine, Nodes, facts
from repro.config.errors import ConfigError, require
from repro.host import files
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.render import units
from repro.systems.load import names, parse


def command(
    system: str, gpus: int, output: Path | None, profile: Path | None, nodes: int, quick: bool, json: bool
) -> int:
    """Measure this machine, or nodes of a cluster with a `profile`, and write a system file.

    `gpus`: ranks, of each node.  Returns 1 if a rank or the job fails, 130 if interrupted.
    """
    path = _checked(output or Path(f"{system}-calibrated.toml"))
    if profile is None and nodes:
        raise ConfigError("--nodes", nodes, "with --profile, whose cluster has them")
    machine: Machine = (
        Here(system, gpus) if profile is None else Nodes(system, profile, nodes or 1, gpus, path)
    )
    experiments = plan.experiments(
        machine.system, machine.ranks, machine.precision, quick, per_node=machine.per_node
    )
    began = time.perf_counter()
    with Interrupt() as interrupt:
        answer = machine.measure(Job(experiments=experiments), interrupt, quiet=json)
    if interrupt:
        return 128 + interrupt.signal
    if answer["outcome"] != "ok":
        print(f"error: calibration ended in {answer['outcome']}: {answer['reason']}", file=sys.stderr)
        return 1
    document = tables(
        system,
        machine.precision,
        answer["results"],
        repeats=experiments[0].training.steps,
        load=answer["load"],
        quick=quick,
        site=facts(answer["place"]) if "place" in answer else None,
    )
    parse(document, name=path.stem, file=str(path))
    files.replace(path, toml.text(document))
    seconds = round(time.perf_counter() - began, 1)
    if json:
        print(jsonlib.dumps({"file": str(path), "seconds": seconds, "system": document}))
    else:
        _show(path, document, seconds)
    return 0


def _checked(path: Path) -> Path:
    """`path`, or the error that would come after the minute that measuring takes."""
    require(path.suffix == ".toml", "--output", str(path), "a file that ends in .toml")
    require(
        path.stem not in names(), "--output", str(path), f"not the name of a packaged system, {path.stem}"
    )
    folder = path.parent
    require(folder.is_dir(), "--output", str(path), "a file in a folder that exists")
    usable = os.access(path if path.exists() else folder, os.W_OK) and not path.is_dir()
    require(usable, "--output", str(path), "a file that may be written")
    return path


def _show(path: Path, document: dict[str, Any], seconds: float) -> None:
    device, facts = document["device"], document["provenance"]["facts"]
    precision, peak = next(iter(device["peak_flops"].items()))
    print(
        f"{device['name']}: {document['provenance']['ranks']} ranks, {facts['calls_measured']} calls of ",
        end="",
    )
    print(f"{facts['operators_measured']} operators in {units.seconds(seconds)}")
    print(f"  fastest product     {units.flop_rate(peak['value'])} {precision} a rank")
    copied = units.size(device["memory_bandwidth"]["value"])
    print(f"  copy                {copied}/s a rank, read and written")
    print(f"  host                {units.seconds(facts['host_s_per_operator'])} an operator")
    for name, link in document["links"].items():
        for op, found in link.get("collectives", {}).items():
            (small, least), (large, most) = found["points"][0], found["points"][-1]
            quick = f"{units.seconds(least)} for {units.size(small)}"
            print(f"  {op:<15}{name:<8}{quick}, {units.size(large / most)}/s for {units.size(large)}")
        if "overlap_cost" in link:
            lost = units.percent(link["overlap_cost"]["value"])
            print(f"  compute loses {lost} of the seconds of a collective beside it")
    spread, error = units.percent(facts["spread_of_calls"]), units.percent(facts["error_of_rates"])
    print(f"  spread of calls {spread} (half of the quartiles' distance), ", end="")
    print(f"error of the fitted rates {error} (median)")
    print(f"{path}  (repro systems {path})")
