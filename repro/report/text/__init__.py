"""Text output of commands, one module per command.

The commands of `cli` call these modules, which call the packages that compute the results.
"""
