"""How fast a rank computes here: matrix products on every core at once, in seconds of their processors.

An emulated network keeps a ratio of compute to messages, so that its rates hold for one rate of compute.  What else
runs here takes cores from ranks and from this measurement alike, and does not enter the result.

    python -m repro.lab.products        FLOP for each second of this process's processor
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from repro.config.network import CORES_SHARE
from repro.host.resources import usable_cores

PRODUCTS = "products_flops_per_s"
"""The fact of a calibrated file that has it."""
SECONDS = 0.5
WIDTH = 192
"""Of the products, in fp32: what the small models of twins have."""


def of_a_rank(world: int) -> float:
    """FLOP/s of each of `world` ranks on this machine, held to their share of the cores."""
    cores = usable_cores()
    running = [
        subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        for _ in range(min(cores, world))
    ]
    found = [float(process.communicate()[0]) for process in running]
    return statistics.median(found) * CORES_SHARE * min(1.0, cores / world)


def main() -> int:
    """Measure with one thread, and print it."""
    import torch

    torch.set_num_threads(1)
    a, out = torch.ones(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    torch.mm(a, a, out=out)
    began, done = time.process_time(), 0
    while time.process_time() < began + SECONDS:
        torch.mm(a, a, out=out)
        done += 1
    print(2 * WIDTH**3 * done / (time.process_time() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
