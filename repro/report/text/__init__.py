"""Text output of the `repro` commands, one module for each group of commands.

The commands of `cli` call these modules, which call the packages that compute the results.
"""
