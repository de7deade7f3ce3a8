"""`repro doctor`: what works on a machine and what it enables.

`check` is one line of an answer, `machine` asks this machine, `gpu` its GPUs, `kernels` its CUDA compiler and driver,
`binding` whether a task of SLURM sees its node's GPUs; `kernel_table` lists what is compiled for the `sizes` that
suites and models have. `launch.slurm` and `cli` import it.
"""
