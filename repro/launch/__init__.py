"""Runs of suites: planning, start and supervision of ranks, and recording of results.

`run` implements `repro run`, with ranks as local processes (`local_launch`) or in SLURM jobs (`slurm`). The module
`simulated` simulates experiments without ranks.
"""
