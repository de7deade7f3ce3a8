"""Time of a traced step on a system, from operator and collective costs to the schedule of all stages.

`predict` returns the step time. No number of this package is fitted to a value that it predicts.
"""
