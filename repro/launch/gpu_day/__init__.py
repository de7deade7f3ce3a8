"""A timed measurement session on a GPU machine without internet (`repro gpu-day`): steps, the most valuable first.

`steps` builds the steps from `steps.toml`, and `runner` runs each step as a process, for example `step_probe` and
`torch_modules`. `result_files` writes and imports the results.
"""
