"""One rank of a job: the program that a launcher starts, and what it does from joining the others to its result.

`program` is what `python -m` runs, under a `memory_limit`; `session` runs a job's experiments, `experiment` one of
them, `resume` its checkpoints, `trial` what `repro fit --measure` tries.  `launch` and `calibrate` import it.
"""
