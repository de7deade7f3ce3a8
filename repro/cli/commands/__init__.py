"""The commands of `repro` as typer declares them: names, options and help, nothing else; imported by `repro.cli` only.

A command imports what does its work when it is called, so that `--help` needs typer alone.
"""
