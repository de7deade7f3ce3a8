"""`repro lab`: an emulated network by hand, and what its links carry."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from repro.config import ConfigError, EmulatedNetwork, suites
from repro.config.files import build
from repro.config.sizes import at_most
from repro.emulate import ability, standing
from repro.emulate.network import NoNetwork
from repro.emulate.standing import Standing
from repro.launch.local_capacity import max_ranks
from repro.util.console import print_json

EXIT_CODE_WITHOUT_LAB = 3


def check_lab() -> int:
    """Whether a network can be made here, which is tried."""
    lacking = ability.missing()
    print(f"missing: {lacking}" if lacking else "emulated networks can be had here")
    return 1 if lacking else 0


def start_lab(suite: Path | None, experiment: str, asked: Mapping[str, Any]) -> int:
    """Make the network of an experiment, or the one that is asked.  Raises `ConfigError`."""
    network = _network_of(suite, experiment) if suite is not None else build(EmulatedNetwork, dict(asked))
    at_most("nodes x ranks_per_node", network.world, max_ranks())
    if lacking := ability.missing():
        raise ConfigError("lab", says=f"missing: {lacking}")
    try:
        _show(standing.up(network))
    except NoNetwork as error:
        print(error)
        return 1
    return 0


def _network_of(suite: Path, name: str) -> EmulatedNetwork:
    """The network of an experiment of `suite`."""
    known = {entry.experiment.name: entry.experiment for entry in suites.load(suite).entries}
    having = [name for name, experiment in known.items() if experiment.network is not None]
    network = known[name].network if name in known else None
    if network is None:
        right = f"an experiment with a network: {', '.join(having) or 'the file has none'}"
        raise ConfigError("experiment", name, right, file=str(suite))
    return network


def print_lab_status(json: bool) -> int:
    """Show the network that is up."""
    there = standing.find()
    if json:
        print_json({"up": there is not None, **(asdict(there) if there else {})})
    elif there is None:
        print("no network is up")
    else:
        _show(there)
    return EXIT_CODE_WITHOUT_LAB if there is None else 0


def _show(there: Standing) -> None:
    facts = there.facts
    print(f"{there.network}; keeper is process {facts.keeper}, packets of {facts.mtu} bytes")
    for what, rates in facts.rates.items():
        print(
            f"  {what:<24} {min(rates) / 1e6:.4g} to {max(rates) / 1e6:.4g} MB/s measured, {len(rates)} links"
        )
    for where, seconds in facts.round_trip_s.items():
        print(f"  round trip {where:<13} {seconds * 1e6:.0f} us")


def execute_on_rank(rank: int, command: list[str]) -> int:
    """Run a command where `rank` is; its exit code.  Raises `ConfigError`."""
    there = standing.needed()
    if not 0 <= rank < there.network.world:
        raise ConfigError("RANK", rank, f"0 to {there.network.world - 1}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    return subprocess.run(there.facts.command(rank, command), env=environment).returncode


def stop_lab() -> int:
    """Take the network down."""
    was = standing.down()
    print("down" if was else "no network is up")
    return 0 if was else EXIT_CODE_WITHOUT_LAB
