"""One rank of a job, from its start by a launcher to its result.

`program` is the process that `python -m` starts. `session` runs the job's experiments, and `experiment` runs one of
them.
"""
