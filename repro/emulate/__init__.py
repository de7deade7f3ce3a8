"""Emulated networks on one machine: a network namespace per rank and per switch, joined by links with a given rate.

`network` starts an emulated network for a job, and `keeper` is the process that creates the network and measures it.
"""
