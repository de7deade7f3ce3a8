"""Search over layouts for `repro fit` and `repro plan`: candidates, memory limits, step times and their order.

`lower_bound` excludes layouts that cannot fit or cannot be among the first. `planner` simulates the other candidates.
"""
