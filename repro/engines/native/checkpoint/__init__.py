"""Checkpoints of the complete training state: every rank writes its part, and any layout can read it.

`state` lists the states and maps them to parts of parameters, and `files` and `index` are the files on disk. The
ranks of `launch` write and read checkpoints.
"""
