"""The program inside a SLURM job: a controller that starts every launch as a job step and monitors its ranks.

submitit starts `controller` on the first node. `nodes` and `task` run on all nodes as job steps, and `task` reports
over `connection`.
"""
