"""A timed measurement session on a GPU machine without internet (`repro gpu-day`): steps, the most valuable first.

`steps` builds the steps from `steps.toml`, and `runner` runs each step as a process. `result_files` writes and imports
the results. `step_probe` and `torch_modules` are the programs of some steps.
"""
