"""Emulated networks on one machine: a network namespace per rank and per switch, joined by links with a given rate.

`network` starts an emulated network for a job. `simulate` reads the constants of this package, and `launch` runs
experiments on its networks.
"""
