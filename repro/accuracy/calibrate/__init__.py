"""`repro calibrate`: how fast this machine does each thing that a step does, as a system file.

Operators, copies and collectives are measured one by one, and the host on a step of width 8, which has nothing to
compute.  No step of a size that anybody trains is timed, but where ranks share cores: there steps are run without their
messages (`silent`).  `command` asks, `plan` and `calls` say what is measured, `target` does it on each rank, `document`
writes what came out.  `cli` imports it.
"""
