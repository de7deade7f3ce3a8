"""Files, processes, worker pools, units, tables and console output.

The package has no knowledge of training: every other package may import it, and it imports none of them.
"""
