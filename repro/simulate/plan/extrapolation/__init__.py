"""Extrapolation of memory, traffic and step time from shallow traces, for layouts that a plan does not trace in full.

`repro.simulate.plan.planner` is its only user in the product.
"""
