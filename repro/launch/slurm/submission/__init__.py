"""Submission of a suite to SLURM as job arrays: the plan, the checks of the profile, and the batch scripts."""
