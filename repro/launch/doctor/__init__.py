"""Checks of a machine for `repro doctor`: GPUs, drivers, CUDA compiler, SLURM bindings, and the features that they
enable.

`launch.slurm` runs the same checks on the nodes of a cluster.
"""
