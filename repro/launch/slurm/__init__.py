"""Runs of suites on a SLURM cluster: `submission` submits job arrays, and `allocation` runs them inside a job.

`profile` describes a site, `scheduler` queries SLURM, `case_states` derives the state of each submitted experiment, and
`commands` implements `repro logs`, `cancel` and `collect`.
"""
