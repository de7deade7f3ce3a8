"""Submission of a suite as job arrays: selection of cases, packing into jobs, and the batch script.

`check` and `doctor` test a profile against the cluster before submission. `dryrun` shows the jobs without submitting
them.
"""
