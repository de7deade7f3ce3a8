"""The whole state of a training, written by all ranks, each its own part, and read under any layout.

`state` names what there is, `region` says which part of a parameter a rank holds, `files` is a rank's file, `index` the
folder with all of them. `launch` imports it.
"""
