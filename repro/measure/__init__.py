"""Measurement of a training step: times, memory by category, collectives, statistics, and provenance of records.

`local_system` describes the local machine as a `System`.
"""
