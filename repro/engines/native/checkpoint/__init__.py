"""Checkpoints of the complete training state: every rank writes its part, and any layout can read it.

`state` maps the optimizer's shards to rectangles of parameters, and `files` and `index` define the files on disk. The
ranks that `repro.launch` starts write and read checkpoints.
"""
