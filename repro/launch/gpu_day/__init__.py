"""`repro gpu-day`: the measurements that a GPU machine without internet is asked for, in order of their value.

`steps` is the table of measurements, `runner` starts each in a process of its own, and `result_files` writes and reads
the results. The other modules are programs of steps.
"""
