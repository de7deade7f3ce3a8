"""One rank of a job, from its start by a launcher to its result.

`program` is the entry point of the process, `session` runs the experiments of the job, and `experiment` runs one.
"""
