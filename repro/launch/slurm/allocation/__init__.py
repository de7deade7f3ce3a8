"""The program inside a SLURM job: a controller process that starts each launch as a job step and monitors its ranks.

submitit starts `controller` on the first node, and `srun` starts `nodes` and `task` on all nodes. Each `task` runs one
rank and reports to the controller over `connection`.
"""
