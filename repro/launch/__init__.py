"""Runs of suites: planning, start and supervision of ranks, and recording of results.

`run` is the command. Ranks start as local processes (`local_launch`), in SLURM allocations (`slurm`), or are
replaced by simulations (`simulated`).
"""
