"""What is measured and how: live memory by category, seconds of steps, robust statistics, where a record comes from.

`results`, `simulate`, `doctor`, `launch` and `calibrate` import it.
"""
