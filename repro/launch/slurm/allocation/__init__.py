"""The program inside a SLURM job: a controller that starts every launch as a job step and watches its ranks.

submitit starts the controller at `entry` on the first node. `task` and `rank_child` run on all nodes and report over
`connection`.
"""
