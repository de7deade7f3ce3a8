"""Suites on a SLURM cluster: `submission` submits job arrays, `allocation` runs in a job, and `commands` reports.

`profile` describes a site, `scheduler` queries SLURM, and `registry` lists the submissions that `case_states` reads.
"""
