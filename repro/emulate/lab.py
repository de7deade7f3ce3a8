"""`repro lab`: one emulated network per user, which runs until it is stopped, and a check of its requirements."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from repro.config import ConfigError, EmulatedNetwork
from repro.emulate.network import NetworkFacts, NoNetwork, RunningNetwork, request_network, start_keeper
from repro.util import extras
from repro.util.files import write_json


@cache
def missing_requirement() -> str:
    """Return the requirement of emulated networks that this machine lacks; empty if a trial network works."""
    if not sys.platform.startswith("linux"):
        return "network namespaces, which only Linux provides"
    if not extras.is_installed("pyroute2"):
        return extras.missing_package_hint("pyroute2")
    if not shutil.which("nsenter"):
        return "nsenter, of util-linux"
    try:
        RunningNetwork(EmulatedNetwork(nodes=1, ranks_per_node=2)).close()
    except NoNetwork as error:
        return (
            "permission to create network namespaces: run as root, or allow user namespaces "
            f"(sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces): {error}"
        )
    return ""


@dataclass(frozen=True)
class LabNetwork:
    """Running emulated network of `repro lab`: its configuration, processes and measured link rates."""

    network: EmulatedNetwork
    facts: NetworkFacts


def _state_file() -> Path:
    return Path(tempfile.gettempdir()) / f"repro-lab-{os.getuid()}.json"


def _start_time(process: int) -> float:
    """Return the start time of a process in seconds since the epoch.  Raises `ProcessLookupError`."""
    import psutil

    try:
        return float(psutil.Process(process).create_time())
    except psutil.NoSuchProcess:
        raise ProcessLookupError(process) from None


def find_network() -> LabNetwork | None:
    """Return this user's emulated network of `repro lab`; None if no network is running."""
    try:
        found = json.loads(_state_file().read_text(encoding="utf-8"))
        began = _start_time(found["facts"]["keeper"])
    except (OSError, ValueError):
        return None
    if began != found["began"]:
        return None
    return LabNetwork(EmulatedNetwork(**found["network"]), NetworkFacts(**found["facts"]))


def start_network(network: EmulatedNetwork) -> LabNetwork:
    """Start an emulated network, which runs until `stop_network`. Raises `ConfigError` if one runs, or `NoNetwork`."""
    if (running := find_network()) is not None:
        says = "this network is already running; `repro lab down` stops it"
        raise ConfigError("lab", str(running.network), says=says)
    keeper = start_keeper("--stay")
    try:
        facts = request_network(keeper, network)
        state = {"network": asdict(network), "facts": asdict(facts), "began": _start_time(keeper.pid)}
        write_json(_state_file(), state)
    except BaseException:
        keeper.kill()
        keeper.wait()
        raise
    return LabNetwork(network, facts)


def stop_network() -> bool:
    """Stop this user's emulated network of `repro lab`, and return whether a network was running."""
    running = find_network()
    if running is not None:
        os.kill(running.facts.keeper, signal.SIGKILL)
    _state_file().unlink(missing_ok=True)
    return running is not None


def require_network() -> LabNetwork:
    """Return this user's emulated network of `repro lab`.  Raises `ConfigError` if no network is running."""
    if (running := find_network()) is None:
        raise ConfigError("lab", says="no emulated network is running; `repro lab up` starts one")
    return running
