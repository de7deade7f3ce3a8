"""Compute rate of a rank of an emulated network: matrix products on every compute core, per second of processor time.

An emulated network fixes a ratio of compute to messages, so its link rates hold for one compute rate.  Other programs
take cores from ranks and from this measurement alike, and do not change the result.

    python -m repro.emulate.compute_rate        FLOP per second of processor time of this process
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

COMPUTE_RATE_FACT = "products_flops_per_s"
"""Name of the compute rate among the facts of a calibrated file."""
MEASUREMENT_S = 0.5
WIDTH = 192
"""Width of the fp32 products, typical for the small models of twins."""


def rank_flops_per_s(world: int) -> float:
    """Return the FLOP/s of each of `world` ranks with its share of the compute cores.  Raises `NoNetwork`."""
    cores = count_compute_cores(usable_cores())
    command = [sys.executable, "-m", __name__]
    ranks = range(min(cores, world))
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in ranks]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise NoNetwork("the rate at which ranks compute, to which links are scaled, could not be measured")
    return statistics.median(map(float, outputs)) * core_share(world, cores)


def count_flop(seconds: float, clock: Callable[[], float]) -> int:
    """Return the FLOP of this thread's products until `clock` has advanced by at least `seconds`."""
    import torch

    a, out = torch.ones(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    end, done = clock() + seconds, 0
    while clock() < end:
        torch.mm(a, a, out=out)
        done += 1
    return 2 * WIDTH**3 * done


def core_flops_per_s() -> float:
    """Return the FLOP per second of this thread's processor time."""
    count_flop(MEASUREMENT_S / 10, time.thread_time)  # warm-up
    began = time.thread_time()
    return count_flop(MEASUREMENT_S, time.thread_time) / (time.thread_time() - began)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(core_flops_per_s())
