"""`repro doctor`: what works on a machine and what it enables.

`check` is one line of an answer, `machine` asks this machine, `kernels` its CUDA compiler and driver. `launch.slurm`
and `cli` import it.
"""
