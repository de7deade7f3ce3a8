"""`repro.parallelize`: data parallelism and ZeRO stages 1-3 for a user's own module and optimizer.

The package applies the strategies of `repro.parallel` to any PyTorch module. Its name is `repro.wrap`,
because a package `repro.parallelize` would hide the function `repro.parallelize`.
"""
