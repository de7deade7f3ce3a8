"""Search over layouts for `repro fit` and `repro plan`: candidates, memory limits, step times and their order.

`closed_form` rejects layouts whose model states exceed the memory. `planner` traces the remaining candidates.
"""
