"""`repro calibrate`: what was measured and where it is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from repro.accuracy.calibrate.command import Calibrated
from repro.util import units
from repro.util.console import print_json


def print_calibration(
    system: str,
    gpus: int,
    output: Path | None,
    profile: Path | None,
    nodes: int,
    quick: bool,
    suites: Sequence[Path],
    json: bool,
) -> int:
    """Measure this machine, or nodes of a cluster with a `profile`, and write a system file.

    `gpus`: ranks, of each node.  `suites`: see `repro.accuracy.calibrate.command.calibrate`.  Returns 1 if a rank or
    the job fails, 130 if interrupted.
    """
    from repro.accuracy.calibrate.command import calibrate

    found = calibrate(system, gpus, output, profile, nodes, quick, suites, quiet=json)
    if found.signal:
        return 128 + found.signal
    if found.outcome != "ok":
        print(f"error: calibration ended in {found.outcome}: {found.reason}", file=sys.stderr)
        return 1
    if json:
        document = {"file": str(found.path), "seconds": found.seconds, "system": found.document}
        print_json(document)
    else:
        _show(found)
    return 0


def _show(found: Calibrated) -> None:
    from repro.accuracy.calibrate.document import STEP

    device, provenance = found.document["device"], found.document["provenance"]
    facts = provenance["facts"]
    precision, peak = next(iter(device["peak_flops"].items()))
    calls = f"{facts['calls_measured']} calls of {facts['operators_measured']} operators"
    print(f"{device['name']}: {provenance['ranks']} ranks, {calls} in {units.seconds(found.seconds)}")
    copied = units.size(device["memory_bandwidth"]["value"])
    print(f"  fastest product     {units.flop_rate(peak['value'])} {precision} a rank")
    print(f"  copy                {copied}/s a rank, read and written")
    print(f"  host                {units.seconds(facts['host_s_per_operator'])} an operator")
    if STEP in facts:
        print(f"  step                {facts[STEP]:.2f} times its operators one by one, without messages")
        print(
            f"  jitter              {units.seconds(device['time']['jitter_s']['value'])}, variance over mean"
        )
    for name, link in found.document["links"].items():
        for op, measured in link.get("collectives", {}).items():
            (small, least), (large, most) = measured["points"][0], measured["points"][-1]
            few = f"{units.seconds(least)} for {units.size(small)}"
            print(f"  {op:<15}{name:<8}{few}, {units.size(large / most)}/s for {units.size(large)}")
        if "overlap_cost" in link:
            lost = units.percent(link["overlap_cost"]["value"])
            print(f"  compute loses {lost} of the seconds of a collective beside it")
    print(
        f"  spread of calls     {units.percent(facts['spread_of_calls'])} (half of the quartiles' distance)"
    )
    print(f"  error of the rates  {units.percent(facts['error_of_rates'])} (median)")
    print(f"{found.path}  (repro systems {found.path})")
