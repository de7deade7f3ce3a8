"""Suites on a SLURM cluster: `site` describes it, `submission` submits, `allocation` runs in a job, and `following`
reports.

These packages import each other in one direction: `submission`, `following`, `allocation`, `site`.
"""
