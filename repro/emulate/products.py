"""How fast a rank computes here: matrix products on every core that ranks compute on, in seconds of these.

An emulated network keeps a ratio of compute to messages, so that its rates hold for one rate of compute.  What else
runs here takes cores from ranks and from this measurement alike, and does not enter the result.

    python -m repro.emulate.products        FLOP for each second of this process's processor
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from repro.config.network import core_share
from repro.emulate.network import NoNetwork
from repro.util.processes import count_compute_cores, usable_cores

PRODUCTS = "products_flops_per_s"
"""The fact of a calibrated file that has it."""
SECONDS = 0.5
WIDTH = 192
"""Of the products, in fp32: what the small models of twins have."""


def of_a_rank(world: int) -> float:
    """FLOP/s of each of `world` ranks on this machine, held to their share of the cores.  Raises `NoNetwork`."""
    cores = count_compute_cores(usable_cores())
    running = [
        subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        for _ in range(min(cores, world))
    ]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise NoNetwork("the rate at which ranks compute, to which links are scaled, could not be measured")
    return statistics.median(map(float, said)) * core_share(world, cores)


def flop_in(seconds: float, clock: Callable[[], float]) -> int:
    """FLOP of the products that this thread gets done while `clock` goes on by `seconds`, or a little more."""
    import torch

    a, out = torch.ones(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    end, done = clock() + seconds, 0
    while clock() < end:
        torch.mm(a, a, out=out)
        done += 1
    return 2 * WIDTH**3 * done


def of_this_core() -> float:
    """FLOP for each second of this thread's processor."""
    flop_in(SECONDS / 10, time.thread_time)  # what the first products do once
    began = time.thread_time()
    return flop_in(SECONDS, time.thread_time) / (time.thread_time() - began)


def main() -> int:
    """Measure with one thread, and print it."""
    import torch

    torch.set_num_threads(1)
    print(of_this_core())
    return 0


if __name__ == "__main__":
    sys.exit(main())
