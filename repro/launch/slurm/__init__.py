"""Suites on a SLURM cluster: `submission`, `following` and `allocation`, which each import the next, and `site` below.

The command line and `repro.accuracy.calibrate` may import it.
"""
