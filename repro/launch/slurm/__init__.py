"""Suites on a SLURM cluster: submission through submitit, the ranks' controller, and what became of it."""
