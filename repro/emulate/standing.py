"""An emulated network that stays until it is taken down, one for each user: to try things on by hand."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from repro.config import ConfigError, EmulatedNetwork
from repro.emulate.network import Facts, ask, start_keeper
from repro.util.files import write_json


@dataclass(frozen=True)
class Standing:
    """A network that is up."""

    network: EmulatedNetwork
    facts: Facts


def _file() -> Path:
    return Path(tempfile.gettempdir()) / f"repro-lab-{os.getuid()}.json"


def find() -> Standing | None:
    """The network that is up; None where there is none, or its keeper has ended."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        began = psutil.Process(found["facts"]["keeper"]).create_time()
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    if began != found["began"]:
        return None
    return Standing(EmulatedNetwork(**found["network"]), Facts(**found["facts"]))


def up(network: EmulatedNetwork) -> Standing:
    """Make a network and leave it.  Raises `ConfigError` if one is up, `NoNetwork` if it cannot be had."""
    if (there := find()) is not None:
        raise ConfigError("lab", str(there.network), says="is up; `repro lab down` takes it down")
    keeper = start_keeper("--stay")
    try:
        facts = ask(keeper, network)
        began = psutil.Process(keeper.pid).create_time()
        write_json(_file(), {"network": asdict(network), "facts": asdict(facts), "began": began})
    except BaseException:
        keeper.kill()
        keeper.wait()
        raise
    return Standing(network, facts)


def down() -> bool:
    """Take the network down; False if none is up."""
    there = find()
    if there is not None:
        os.kill(there.facts.keeper, signal.SIGKILL)
    _file().unlink(missing_ok=True)
    return there is not None


def needed() -> Standing:
    """The network that is up.  Raises `ConfigError` if there is none."""
    there = find()
    if there is None:
        raise ConfigError("lab", says="no network is up; `repro lab up` makes one")
    return there
