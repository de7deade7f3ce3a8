"""Suites on a SLURM cluster.

`profile` describes a site, and `scheduler` queries SLURM. `submission` submits job arrays, `allocation` runs in a job,
and `monitoring` reports.
"""
