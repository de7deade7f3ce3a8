"""Submission of a suite as job arrays: the plan, checks of the profile against the cluster, and the batch scripts."""
