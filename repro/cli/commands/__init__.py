"""Commands of `repro` as typer declares them: names, options and help.

A command imports its implementation when it is called, so that `--help` needs typer only.
"""
