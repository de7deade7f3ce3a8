"""Output of `repro status` and `repro lab`: states of experiments on a SLURM cluster, and emulated networks."""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from repro.config import ConfigError, EmulatedNetwork, require, suites
from repro.config.files import build_dataclass
from repro.config.sizes import at_most
from repro.emulate import lab
from repro.emulate.lab import LabNetwork
from repro.emulate.network import NoNetwork
from repro.launch.local_launch import max_ranks
from repro.launch.slurm.case_states import (
    CANCELLED,
    DONE,
    FAILED,
    LOST,
    PENDING,
    REQUEUED,
    RUNNING,
    STATES,
    CaseState,
    Registry,
    read_case_states,
    status_exit_code,
)
from repro.launch.slurm.scheduler import SchedulerError
from repro.results.store import Store
from repro.util.console import new_table, print_json, print_page, stdout

REFRESH_S = 5.0
"""Time between two refreshes of `repro status --watch`, in seconds."""
MAX_CASES = 16
"""Maximum number of submitted experiments that `repro status` prints without `--details`."""
_STATE_COLOURS = {
    RUNNING: "green",
    FAILED: "red",
    LOST: "red",
    CANCELLED: "yellow",
    REQUEUED: "yellow",
    PENDING: "dim",
}


def print_status(results: Path, watch: bool, every: bool, json: bool, details: bool) -> int:
    """Print the state of every experiment in each suite's newest submission, or in all submissions (`every`).

    Returns 3 while an experiment waits or runs, else 1 if an experiment failed, else 0.
    """
    registry, store = Registry(results), Store(results)
    require(registry.all(), "--results", str(results), "a results folder of a `repro submit` command")
    try:
        if watch and not json:
            return _watch(registry, store, every, details)
        cases, warnings = read_case_states(registry, store, every)
    except SchedulerError as error:
        raise ConfigError("SLURM", says=f"does not answer: {error}") from None
    if json:
        print(jsonlib.dumps({"cases": [case.as_dict() for case in cases], "warnings": warnings}))
    else:
        print_cases(cases, warnings, stdout(), None if details else MAX_CASES)
    return status_exit_code(cases)


def print_cases(cases: list[CaseState], warnings: list[str], console: Console, most: int | None) -> None:
    """Print the number of experiments by state, then rows of at most `most` of them (None: all), finished ones last."""
    unrecorded = any(case.state in (LOST, CANCELLED) and not case.recorded for case in cases)
    shown = sorted(cases, key=lambda case: case.state == DONE)[:most]
    hidden = len(cases) - len(shown)
    print_page(
        f"{_totals_text(cases)}.",
        _cases_table(shown),
        f"--details lists {hidden} more experiments." if hidden else "",
        "repro collect writes records of lost and cancelled experiments; repro submit runs them again."
        * unrecorded,
        console=console,
    )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _cases_table(cases: list[CaseState]) -> Table:
    made = new_table("case", "job", "state", "nodes", "detail", left=5, wrap=("detail",))
    for case in cases:
        state = (
            f"{case.state} ({case.outcome})" if case.state == DONE and case.outcome != "ok" else case.state
        )
        if case.state in (FAILED, LOST):
            state = f"{case.state}: {case.failure}"
        again = f"started {case.restarts + 1} times" if case.restarts else ""
        detail = "; ".join(part for part in (case.detail, again) if part)
        colour = _STATE_COLOURS.get(case.state, "")
        made.add_row(case.name, case.job, Text(state, style=colour), case.nodes, detail)
    return made


def _totals_text(cases: list[CaseState]) -> str:
    counts = Counter(case.state for case in cases)
    text = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    suites = ", ".join(dict.fromkeys(case.suite for case in cases))
    return f"{suites}: {len(cases)} cases: {text}"


def _watch(registry: Registry, store: Store, every: bool, details: bool) -> int:
    """Refresh the table of states while an experiment waits or runs, and return the exit code of `repro status`.

    Raises `SchedulerError` if the first query of SLURM fails. Failures of later queries are printed only.
    """
    console = stdout()
    cases, warnings = read_case_states(registry, store, every)
    note = ""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown = _cases_table([case for case in cases if case.state != DONE] or cases)
            live.update(Group(shown, Text(f"{_totals_text(cases)}{note}", style="dim italic")), refresh=True)
            if not note and status_exit_code(cases) != 3:
                break
            time.sleep(REFRESH_S)
            try:
                cases, warnings = read_case_states(registry, store, every)
                note = ""
            except SchedulerError as error:
                note = note or f"; SLURM has not answered since {time.strftime('%H:%M:%S')}: {error}"
    print_cases(cases, warnings, console, None if details else MAX_CASES)
    return status_exit_code(cases)


EXIT_CODE_WITHOUT_LAB = 3


def check_lab() -> int:
    """Print whether emulated networks work on this machine; return 1 if a requirement is missing, else 0."""
    lacking = lab.missing_requirement()
    print(f"missing: {lacking}" if lacking else "emulated networks work on this machine")
    return 1 if lacking else 0


def start_lab(suite: Path | None, experiment: str, sizes: Mapping[str, Any]) -> int:
    """Start the emulated network of `experiment` in `suite`, or one with the fields `sizes`; return 1 on failure."""
    network = _network_of(suite, experiment) if suite else build_dataclass(EmulatedNetwork, dict(sizes))
    at_most("nodes x ranks_per_node", network.world, max_ranks())
    if lacking := lab.missing_requirement():
        raise ConfigError("lab", says=f"missing: {lacking}")
    try:
        _print_network(lab.start_network(network))
    except NoNetwork as error:
        print(error)
        return 1
    return 0


def _network_of(suite: Path, name: str) -> EmulatedNetwork:
    """Return the emulated network of the experiment `name` in `suite`. Raises `ConfigError` if it has none."""
    known = {entry.experiment.name: entry.experiment for entry in suites.load_suite(suite).entries}
    having = [name for name, experiment in known.items() if experiment.network is not None]
    network = known[name].network if name in known else None
    if network is None:
        right = f"an experiment with an emulated network: {', '.join(having) or 'none in this file'}"
        raise ConfigError("experiment", name, right, file=str(suite))
    return network


def print_lab_status(json: bool) -> int:
    """Print the running emulated network of this user; return 3 if no network is running, else 0."""
    there = lab.find_network()
    if json:
        print_json({"up": there is not None, **(asdict(there) if there else {})})
    elif there is None:
        print("no network is running")
    else:
        _print_network(there)
    return EXIT_CODE_WITHOUT_LAB if there is None else 0


def _print_network(there: LabNetwork) -> None:
    facts = there.facts
    print(f"{there.network}; owned by process {facts.keeper}; MTU {facts.mtu} bytes")
    for what, rates in facts.rates.items():
        print(
            f"  {what:<24} measured {min(rates) / 1e6:.4g} to {max(rates) / 1e6:.4g} MB/s on {len(rates)} links"
        )
    for where, seconds in facts.round_trip_s.items():
        print(f"  round-trip time {where:<8} {seconds * 1e6:.0f} us")


def execute_on_rank(rank: int, command: list[str]) -> int:
    """Run a command in the network namespace of an emulated rank, and return its exit code. Raises `ConfigError`."""
    there = lab.require_network()
    require(0 <= rank < there.network.world, "RANK", rank, f"0 to {there.network.world - 1}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    return subprocess.run(there.facts.exec_command(rank, command), env=environment).returncode


def stop_lab() -> int:
    """Stop the running emulated network of this user; return 3 if no network is running, else 0."""
    was_running = lab.stop_network()
    print("stopped" if was_running else "no network is running")
    return 0 if was_running else EXIT_CODE_WITHOUT_LAB
