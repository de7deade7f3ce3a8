"""An emulated network that runs: where its ranks are and how a program starts there.  It goes when it is closed.

Also when whoever started it is killed: the keeper dies with it, the holders of the namespaces die with the keeper, and
the kernel removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from repro.config import EmulatedNetwork


class NoNetwork(Exception):
    """The network cannot be had as asked; `str` says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a keeper says of its network: processes, and what was measured."""

    keeper: int
    user_namespace: bool
    """Whether it was made by a user who is root in a user namespace only."""
    ranks: list[int]
    """Process that holds each rank's namespace."""
    nodes: list[int]
    """The same of each node's."""
    cores: int
    """That the ranks share."""
    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Measured bytes/s of every link by kind and direction."""
    round_trip_s: dict[str, float] = field(default_factory=dict)
    """Of one byte there and back, `within` a node and `between` nodes, in the kernel alone."""

    def command(self, rank: int, command: list[str]) -> list[str]:
        """What runs `command` where `rank` is."""
        inside = ["--user", "--preserve-credentials"] if self.user_namespace else []
        return ["nsenter", "--target", str(self.ranks[rank]), "--net", *inside, "--", *command]


class RunningNetwork:
    """A network made and verified; use as a context manager, or close it."""

    def __init__(self, network: EmulatedNetwork):
        """Raises `NoNetwork`.  The calling thread must live as long as the network."""
        self.network = network
        self._keeper = start_keeper("--parent", str(os.getpid()))
        try:
            self.facts = ask(self._keeper, network)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take it down."""
        self._keeper.kill()
        self._keeper.wait()
        for stream in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> RunningNetwork:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_keeper(*arguments: str) -> subprocess.Popen[str]:
    """A keeper that waits to be asked."""
    return subprocess.Popen(
        [sys.executable, "-m", "repro.emulate.keeper", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ask(keeper: subprocess.Popen[str], network: EmulatedNetwork) -> Facts:
    """Have a keeper make a network.  Raises `NoNetwork`."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.write(json.dumps(asdict(network)) + "\n")
        keeper.stdin.flush()
    line = keeper.stdout.readline()
    if not line:
        said = keeper.stderr.read().strip().splitlines()
        raise NoNetwork(f"the emulated network could not be made: {said[-1] if said else 'its keeper died'}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise NoNetwork(f"emulated network {network}: {answer['error']}")
    return Facts(**answer)
