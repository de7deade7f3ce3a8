"""Traces: one step of the native engine on `meta` tensors as a list of allocations, operators and messages.

`roles` traces one rank of each pipeline role. `memory` and `time` read the events of a trace.
"""
