"""Pipeline parallelism (2104.04473 sec. 2.2): schedules as data, the runner of all of them, what crosses stages.

`schedule` has GPipe, 1F1B and interleaved 1F1B and needs no torch; `runner` executes any of them; `boundary` sends and
receives activations and their gradients. `train` and `simulate` import it, and `claims` counts on `schedule`.
"""
