"""Output of `repro doctor` and `repro calibrate`: checks of this machine or a cluster, and a measured system file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.calibrate.calibration import Calibrated
from repro.launch.doctor import YES, Check
from repro.util import units
from repro.util.console import new_table, print_json, print_page, stdout
from repro.util.units import NO_VALUE

if TYPE_CHECKING:
    from repro.launch.doctor.kernels import KernelRow


def print_machine_checks(results: Path, compile_for: str, json: bool, details: bool) -> int:
    """Print the checks of this machine; return 1 if no experiment can run on it, else 0.

    `compile_for`: GPU architectures, such as `sm_80`, for which all CUDA kernels are compiled and listed.
    """
    from repro.launch.doctor import kernels
    from repro.launch.doctor.machine import examine_machine
    from repro.measure.provenance import gpus

    checks = examine_machine(results, compile_for)
    rows = kernels.compile_kernel_rows(compile_for) if compile_for else []
    more = {"gpus": gpus(), **({"kernels": [asdict(row) for row in rows]} if rows else {})} if json else {}
    code = _print_checks(checks, json=json, undone="run here", details=details, more=more)
    if rows and not json:
        _print_kernels(rows)
    return code


def _print_kernels(rows: Sequence[KernelRow]) -> None:
    """Print one line per CUDA kernel and range of row widths, with its resources on each GPU architecture."""
    architectures = list(dict.fromkeys(row.architecture for row in rows))
    by_kernel: dict[tuple[str, str], dict[str, KernelRow]] = {}
    for row in rows:
        by_kernel.setdefault((row.program, row.kernel), {})[row.architecture] = row
    shown = new_table("kernel", "columns", "threads", *architectures, left=2)
    for (program, kernel), of in by_kernel.items():
        row = next(iter(of.values()))
        sizes = "-".join(map(str, dict.fromkeys((row.sizes[0], row.sizes[-1])))) if row.sizes else "any"
        cells = [_cell(of[a]) if a in of else "-" for a in architectures]
        shown.add_row(
            f"{program.partition(' ')[0]}.{kernel} {_specialised(program)}", sizes, str(row.threads), *cells
        )
    console = stdout(least=140)
    console.print()
    console.print(shown)
    spilled = sum(row.spilled_bytes > 0 for row in rows)
    console.print(
        "Cells: registers per thread / bytes of shared memory per block / occupancy / lower bound of the requested "
        f"share of memory bandwidth (Little's law, not measured). {spilled or 'No'} kernels spill registers."
    )


def _cell(row: KernelRow) -> str:
    spilled = f" spilled {row.spilled_bytes}" if row.spilled_bytes else ""
    parts = [NO_VALUE if part is None else f"{part:.0%}" for part in (row.occupancy, row.bandwidth)]
    return "/".join([str(row.registers), str(row.shared_bytes), *parts]) + spilled


def _specialised(program: str) -> str:
    """Return the macro definitions of a compiled CUDA program in short form, such as `half by 8 bias`."""
    words = dict(word.split("=") for word in program.split()[1:])
    kinds = [words[key] for key in ("TYPE", "GRADIENT", "COPY") if key in words]
    width = [f"by {words['WIDTH']}"] if "WIDTH" in words else []
    flags = {"HAS_BIAS": "bias", "HAS_RESIDUAL": "residual", "DROP": "drop", "CENTRED": "centred"}
    return " ".join([*kinds, *width, *(name for key, name in flags.items() if words.get(key) == "1")])


def print_cluster_checks(profile: Path, results: Path, nodes: int, json: bool, details: bool) -> int:
    """Print checks of the SLURM cluster in file `profile`, with a job on `nodes` nodes if not 0; return 1 if unfit."""
    from repro.launch.slurm.profile import load_profile
    from repro.launch.slurm.submission.profile_check import examine_profile

    hint = "" if nodes else "--nodes 1 also checks a node: GPUs, network interfaces, NCCL, shared folder."
    checks = list(examine_profile(load_profile(profile), results.absolute(), nodes))
    return _print_checks(checks, json=json, undone="submitted", details=details, hint=hint)


def _print_checks(
    checks: Sequence[Check],
    *,
    json: bool,
    undone: str,
    details: bool,
    hint: str = "",
    more: dict[str, Any] | None = None,
) -> int:
    """Print the results of machine or cluster checks; return 1 if a fatal check failed, else 0.

    `undone`: the action that a fatal failure prevents, such as `submitted`. `hint`: text to print without such a
    failure. `more`: further keys of the JSON document. `details`: also print the checks that passed.
    """
    broken = [check.name for check in checks if check.fatal]
    if json:
        checked = [asdict(check) for check in checks]
        print_json({"usable": not broken, "checks": checked, **(more or {})})
        return 1 if broken else 0
    passed = [check for check in checks if check.state == YES]
    shown = [check for check in checks if details or check.state != YES]
    if not details:  # Omit installation commands, which would add four lines to the table.
        shown = [replace(c, found=re.sub("^not installed: .*", "not installed", c.found)) for c in shown]
    rows = [(check.state, check.name, check.found, check.enables) for check in shown]
    wrap = ("found", "use")
    failure = f"Nothing can be {undone} until these checks pass: {', '.join(broken)}."
    print_page(
        failure if broken else f"Suites can be {undone}.",
        f"{len(passed)} of {len(checks)} checks passed: {', '.join(check.name for check in passed)}.",
        new_table("state", "check", *wrap, left=4, wrap=wrap, rows=rows),
        "" if broken else hint,
        "" if details else "--details lists every check, and the commands that install libraries.",
    )  # fmt: skip
    return 1 if broken else 0


def print_calibration(found: Calibrated, json: bool) -> int:
    """Print the rates that a calibration measured; return 1 if it failed, 128 plus the signal number after a signal."""
    if found.signal:
        return 128 + found.signal
    if found.outcome != "ok":
        print(f"error: the calibration failed ({found.outcome}): {found.reason}", file=sys.stderr)
        return 1
    if json:
        print_json({"file": str(found.path), "seconds": found.seconds, "system": found.document})
    else:
        _print_calibrated(found)
    return 0


def _print_calibrated(found: Calibrated) -> None:
    """Print the calibrated rates of a rank, and each collective's times for the smallest and the largest message."""
    from repro.accuracy.calibrate.document import STEP

    device, provenance = found.document["device"], found.document["provenance"]
    facts = provenance["facts"]
    precision, peak = next(iter(device["peak_flops"].items()))
    calls = f"{facts['calls_measured']} calls of {facts['operators_measured']} operators"
    spread = units.percent(facts["spread_of_calls"])
    rows = [
        ("fastest product", f"{units.flop_rate(peak['value'])} per rank in {precision}"),
        ("memory copy", f"{units.size(device['memory_bandwidth']['value'])}/s per rank, reads plus writes"),
        ("host time", f"{units.seconds(facts['host_s_per_operator'])} per operator"),
        ("spread of calls", f"{spread}: half of the interquartile range over the median"),
    ]
    if STEP in facts:
        jitter = units.seconds(device["time"]["jitter_s"]["value"])
        rows.append(("step time", f"{facts[STEP]:.2f} times the sum of operator times, without collectives"))
        rows.append(("jitter", f"{jitter}, variance over mean"))
    links = found.document["links"].items()
    for name, link in links:
        if "overlap_cost" in link:
            lost = units.percent(link["overlap_cost"]["value"])
            rows.append(
                ("overlap cost", f"compute time grows by {lost} of the time of a parallel {name} collective")
            )
    headings = ("collective", "link", "smallest message", "time (us)", "largest message", "rate (GB/s)")
    collectives = new_table(*headings, left=2)
    for name, link in links:
        for op, measured in link.get("collectives", {}).items():
            (small, least), (large, most) = measured["points"][0], measured["points"][-1]
            ends = units.size(small), units.number(least * 1e6), units.size(large)
            collectives.add_row(op, name, *ends, units.number(large / most / 1e9))
    error = units.percent(facts["error_of_rates"])
    print_page(
        f"{found.path}: {device['name']}, {provenance['ranks']} ranks, median error of the fitted rates {error}.",
        f"{calls} were measured in {units.seconds(found.seconds)}.",
        new_table("quantity", "measured value", left=2, wrap=("measured value",), rows=rows),
        collectives,
        command=f"repro systems {found.path}",
    )
