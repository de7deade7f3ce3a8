"""What the operating system gives: whole files, processes that end with their parent, cores and memory.

`files` replaces a file as a whole, `processes` ties a process to its parent, `resources` counts cores and memory,
`workers` runs functions on all cores, `garbage` holds Python's collector back, `extras` names what brings a package
that is not here. It imports nothing of the harness; everything may import it.
"""
