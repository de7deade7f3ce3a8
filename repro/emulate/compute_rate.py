"""Measurement of the FLOP/s at which a rank of an emulated network computes, by matrix products on every compute core.

The link rates of an emulated network are scaled to this rate.  The rate is per second of processor time, so other
programs on the machine do not change it.

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
"""Key in a hardware description (system file) under which `repro calibrate` records a core's matrix-product FLOP/s."""
MEASUREMENT_S = 0.5
WIDTH = 192
"""Rows and columns of the fp32 matrices whose products measure a core's FLOP/s, as small as in scaled-down models."""


def rank_flops_per_s(world: int) -> float:
    """Measure the FLOP/s of one of `world` ranks that share the compute cores.  Raises `NoNetwork` on a failure."""
    cores = count_compute_cores(usable_cores())
    command = [sys.executable, "-m", __name__]
    ranks = range(min(cores, world))
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in ranks]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise NoNetwork("the compute rate of a rank could not be measured: a measuring process failed")
    return statistics.median(map(float, outputs)) * core_share(world, cores)


def count_flop(seconds: float, clock: Callable[[], float]) -> int:
    """Multiply matrices in this thread until `clock` has advanced by `seconds`, and return the FLOP of the products."""
    import torch

    a, out = torch.ones(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    end, done = clock() + seconds, 0
    while clock() < end:
        torch.mm(a, a, out=out)
        done += 1
    return 2 * WIDTH**3 * done


def core_flops_per_s() -> float:
    """Measure fp32 matrix products on one core, and return their FLOP per second of processor time."""
    count_flop(MEASUREMENT_S / 10, time.thread_time)  # warm-up
    began = time.thread_time()
    return count_flop(MEASUREMENT_S, time.thread_time) / (time.thread_time() - began)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(core_flops_per_s())
