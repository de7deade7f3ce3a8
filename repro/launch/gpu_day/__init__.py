"""Measurements on a GPU machine without internet, within a time limit and by decreasing value (`repro gpu-day`).

`steps` builds the steps from `steps.toml`, and `runner` runs each step as a process, for example `step_probe` and
`torch_modules`. `result_files` writes and imports the results.
"""
