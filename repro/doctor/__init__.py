"""`repro doctor`: what works on a machine and what it enables.

`check` is one line of an answer, `machine` asks this machine, `kernels` its CUDA compiler and driver, `binding` whether
a task of SLURM sees its node's GPUs. `launch.slurm` and `cli` import it.
"""
