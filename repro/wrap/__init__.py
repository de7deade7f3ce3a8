"""`repro.parallelize`: data parallelism and ZeRO stages 1-3 for a user's own module and optimizer.

The package applies `parallel` to modules that are not the suite's GPT. Its name differs from the function, because a
package `repro.parallelize` would hide that function.
"""
