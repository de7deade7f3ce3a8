"""Suites on a SLURM cluster: `submission` submits job arrays, `allocation` runs in a job, and `commands` reports.

`profile` describes a site, `scheduler` queries SLURM, and `case_states` lists the submissions and their cases.
"""
