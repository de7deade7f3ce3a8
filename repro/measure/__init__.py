"""Measurement of a running step: timing, memory by category, collectives, robust statistics, and provenance of a
record.

`local_system` describes the local machine as a `System`. Engines, simulations and launches use this package.
"""
