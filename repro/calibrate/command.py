"""``repro calibrate``: check what is asked, start the ranks, write the file, say what came out."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from repro.calibrate import plan, toml
from repro.calibrate.document import tables
from repro.config.errors import ConfigError, require
from repro.launch import local
from repro.launch.interrupt import Interrupt
from repro.launch.job import Job
from repro.launch.once import run_once
from repro.measure.provenance import usable_cores
from repro.simulate.options import precision_of
from repro.systems.load import LOCAL, names, parse
from repro.systems.load import load as load_system

TARGET = "repro.calibrate.target:run_rank"
RANKS_ON_CORES = 2


def command(system: str, count: int, output: Path | None, quick: bool, json: bool) -> int:
    """Measure this machine and write a system file; 1 if a rank fails, 130 if interrupted."""
    if system not in local.DEVICES:
        raise ConfigError(
            "--system",
            system,
            f"one of {', '.join(local.DEVICES)}: what can be measured is the machine at hand",
        )
    on_cpu = local.DEVICES[system] == "cpu"
    ranks = count or (min(RANKS_ON_CORES, usable_cores()) if on_cpu else local.cuda_devices())
    _check_ranks(on_cpu, count, ranks)
    path = _checked(output or Path(f"{system}-calibrated.toml"))
    precision = "fp32" if on_cpu else precision_of(load_system(LOCAL))
    experiments = plan.experiments(system, ranks, precision, quick)
    if not json:
        print(f"measuring with {ranks} ranks; let nothing else run meanwhile", file=sys.stderr)
    began, load = time.perf_counter(), round(os.getloadavg()[0], 2)
    with Interrupt() as interrupt:
        ending, results = run_once(Job(experiments=experiments), interrupt, target=TARGET)
    if interrupt:
        return 128 + interrupt.signal
    if ending.outcome != "ok":
        print(f"error: calibration ended in {ending.outcome}: {ending.reason}", file=sys.stderr)
        return 1
    repeats = experiments[0].training.steps
    document = tables(system, precision, results, repeats=repeats, load=load, quick=quick)
    parse(document, name=path.stem, file=str(path))
    _write(path, document)
    seconds = round(time.perf_counter() - began, 1)
    if json:
        print(jsonlib.dumps({"file": str(path), "seconds": seconds, "system": document}))
    else:
        _show(path, document, seconds)
    return 0


def _check_ranks(on_cpu: bool, asked: int, ranks: int) -> None:
    require(asked >= 0, "--gpus", asked, "a number of ranks, 1 or more")
    if not on_cpu and ranks == 0:
        raise ConfigError("--system", "local-gpu", "a machine with CUDA devices; none is visible here")
    if not on_cpu and ranks > local.cuda_devices():
        raise ConfigError(
            "--gpus", asked, f"at most the {local.cuda_devices()} CUDA devices that are visible here"
        )


def _checked(path: Path) -> Path:
    """``path``, or the error that would come after the minute that measuring takes."""
    require(path.suffix == ".toml", "--output", str(path), "a file that ends in .toml")
    require(
        path.stem not in names(), "--output", str(path), f"not the name of a packaged system, {path.stem}"
    )
    folder = path.parent
    require(folder.is_dir(), "--output", str(path), "a file in a folder that exists")
    usable = os.access(path if path.exists() else folder, os.W_OK) and not path.is_dir()
    require(usable, "--output", str(path), "a file that may be written")
    return path


def _write(path: Path, document: dict[str, Any]) -> None:
    """All of the file or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(toml.text(document), encoding="utf-8")
    os.replace(partial, path)


def _show(path: Path, document: dict[str, Any], seconds: float) -> None:
    device, facts = document["device"], document["provenance"]["facts"]
    precision, peak = next(iter(device["peak_flops"].items()))
    print(
        f"{device['name']}: {document['provenance']['ranks']} ranks, {facts['calls_measured']} calls of ",
        end="",
    )
    print(f"{facts['operators_measured']} operators in {seconds:g} s")
    print(f"  fastest product     {peak['value'] / 1e12:8.4g} TFLOP/s {precision} a rank")
    print(
        f"  copy                {device['memory_bandwidth']['value'] / 1e9:8.4g} GB/s a rank, read and written"
    )
    print(f"  host                {facts['host_s_per_operator'] * 1e6:8.4g} us an operator")
    for name, link in document["links"].items():
        for op, found in link.get("collectives", {}).items():
            (small, least), (large, most) = found["points"][0], found["points"][-1]
            print(
                f"  {op:<15}{name:<8}{least * 1e6:5.4g} us for {small} bytes, {large / most / 1e9:.3g} GB/s for {large}"
            )
        if "overlap_cost" in link:
            print(
                f"  compute loses {link['overlap_cost']['value']:.0%} of the seconds of a collective beside it"
            )
    print(f"  spread of calls {facts['spread_of_calls']:.1%} (half of the quartiles' distance), ", end="")
    print(f"error of the fitted rates {facts['error_of_rates']:.1%} (median)")
    print(f"{path}  (repro systems {path})")
