"""Description of a cluster: its profile, and the answers of its scheduler.

The other packages of `launch.slurm` build on it.
"""
