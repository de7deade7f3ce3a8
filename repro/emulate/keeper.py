"""The process that an emulated network lives and dies with: `python -m repro.emulate.keeper --parent PID`.

A line of JSON on standard input asks for a network; a line of JSON on standard output says what was made, or why not.
It ends when its input does.  Whatever ends it, the kernel removes what it made: nothing has a name outside.
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
from repro.emulate.frames import mtu, payload_share
from repro.util.processes import die_with_parent, usable_cores


def main() -> int:
    """Make the network, say so, and wait."""
    parser = argparse.ArgumentParser(prog="python -m repro.emulate.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, default=0, help="process to die with; 0: none")
    parser.add_argument("--stay", action="store_true", help="stay when the input ends")
    options = parser.parse_args()
    die_with_parent(options.parent)
    network = EmulatedNetwork(**json.loads(sys.stdin.readline()))
    try:
        answer = _make(network)
    except Exception as error:  # whoever asked says what it was; there is nobody else to tell
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        return 1
    while options.stay:
        signal.pause()
    while sys.stdin.readline():
        pass
    return 0


def _make(network: EmulatedNetwork) -> dict[str, Any]:
    for key in ("between", "within"):
        rate = getattr(network, key)
        require(rate < 2**32, key, rate, "less than the 2**32 that a bucket can count")
    from repro.emulate import links, namespaces
    from repro.emulate.verify import verify

    mapped = namespaces.become_root()
    made = links.Links(network)
    return {
        "keeper": os.getpid(),
        "user_namespace": mapped,
        "ranks": [rank.namespace.holder for rank in made.ranks],
        "nodes": [node.namespace.holder for node in made.nodes],
        "cores": usable_cores(),
        "mtu": mtu(network),
        "payload_share": payload_share(network),
        **verify(made),
    }


if __name__ == "__main__":
    sys.exit(main())
