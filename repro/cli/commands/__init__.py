"""Commands of `repro` with their options and help texts, as functions for typer.

A command imports its implementation when it is called, so that `--help` needs typer only.
"""
