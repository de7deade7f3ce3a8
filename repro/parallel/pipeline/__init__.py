"""Pipeline parallelism (2104.04473 sec. 2.2): schedules as data, their runner, and transfers between stages.

`schedule` defines GPipe, 1F1B and interleaved 1F1B without torch. `runner` executes any schedule for an engine.
"""
