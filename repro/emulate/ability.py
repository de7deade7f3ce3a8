"""Whether emulated networks can be had on this machine, and if not, what is missing: in one line."""

from __future__ import annotations

import shutil
import sys
from functools import cache

from repro.config import EmulatedNetwork
from repro.emulate.network import NoNetwork, RunningNetwork
from repro.util import extras

SMALLEST = EmulatedNetwork(nodes=1, ranks_per_node=2)


@cache
def missing() -> str:
    """What this machine lacks; empty where a network of two ranks can be made, which is tried."""
    if not sys.platform.startswith("linux"):
        return "network namespaces, which only Linux has"
    if not extras.is_installed("pyroute2"):
        return extras.missing_package_hint("pyroute2")
    if not shutil.which("nsenter"):
        return "nsenter, of util-linux"
    try:
        RunningNetwork(SMALLEST).close()
    except NoNetwork as error:
        return (
            "network namespaces, which root may make, or any user where user namespaces are allowed "
            f"(sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces): {error}"
        )
    return ""
