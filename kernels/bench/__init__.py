"""Bandwidth benchmark of the kernels on a GPU, run by `make bench-gpu`.

The tests run the benchmark on a CPU to check its logic; CPU times have no meaning. No other package imports it.
"""
