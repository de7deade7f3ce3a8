"""The whole state of a training, written by all ranks, each its own part, and read under any layout."""
