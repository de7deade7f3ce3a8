"""The keeper of an emulated network: the process that makes the network and holds it.

The keeper is `python -m repro.emulate.keeper --parent PID`.  One line of JSON on its standard input asks for a network.
One line of JSON on its standard output describes the network or the error.  The keeper ends when its input ends or its
parent dies, and the kernel removes namespaces without a holder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from repro.config import EmulatedNetwork
from repro.config.errors import require
from repro.emulate.links import Links, become_root
from repro.emulate.network import mtu_bytes, payload_share
from repro.emulate.verify import verify
from repro.util.processes import die_with_parent, usable_cores


def main() -> int:
    """Make the requested network as a keeper, report it, and wait for the end."""
    parser = argparse.ArgumentParser(prog="python -m repro.emulate.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, default=0, help="process to die with; 0: none")
    parser.add_argument("--stay", action="store_true", help="stay when the input ends")
    options = parser.parse_args()
    die_with_parent(options.parent)
    network = EmulatedNetwork(**json.loads(sys.stdin.readline()))
    try:
        answer = _make_network(network)
    except Exception as error:  # the requester reports the error; the keeper has no other reader
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        return 1
    while options.stay:
        signal.pause()
    while sys.stdin.readline():
        pass
    return 0


def _make_network(network: EmulatedNetwork) -> dict[str, Any]:
    for key in ("between", "within"):
        rate = getattr(network, key)
        require(rate < 2**32, key, rate, "less than the 2**32 that a bucket can count")
    mapped = become_root()
    made = Links(network)
    return {
        "keeper": os.getpid(),
        "user_namespace": mapped,
        "ranks": [rank.namespace.holder for rank in made.ranks],
        "nodes": [node.namespace.holder for node in made.nodes],
        "cores": usable_cores(),
        "mtu": mtu_bytes(network),
        "payload_share": payload_share(network),
        **verify(made),
    }


if __name__ == "__main__":
    sys.exit(main())
