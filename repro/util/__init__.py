"""Files, processes, worker pools, units, tables and console output.

Every other package may import this package, which imports none of them.
"""
