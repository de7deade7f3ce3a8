"""Inside a job: what runs on the nodes that SLURM has given.

submitit starts one task, the controller, on the first node (`entry`, `errand`).  It looks at all nodes (`nodes`,
`topology`) and starts each launch as a job step with a task for each rank (`launch`, `srun_step`; `task` and
`rank_child` on the nodes), which say over a connection each how their ranks fare (`connection`).  `work` is what it
has to do, `bundle` the file that says how far it is, `stop` what SLURM's signals mean.  It imports `site`; `following`
and `submission` may import it.
"""
