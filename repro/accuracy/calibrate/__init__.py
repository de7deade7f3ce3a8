"""`repro calibrate`: measurement of a machine, written as a system file.

The measurements cover operators, copies, collectives and the host overhead of a step. No training step whose time will
be predicted is timed.
"""
