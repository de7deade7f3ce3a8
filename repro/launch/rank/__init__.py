"""One rank of a job: the program that a launcher starts, and what it does from joining the others to its result.

`program` is what `python -m` runs, under a `memory_limit`; `session` runs a job's experiments, `experiment` one of
them on its `inputs`, with its `checkpoints`; `gpu_settings` is what a GPU's libraries read at their start, `trial` what
`repro fit --measure` tries.  `launch` and `calibrate` import it.
"""
