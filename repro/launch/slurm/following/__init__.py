"""State of submissions: status, logs, cancellation, and collection of lost cases.

`registry` lists the submissions of a store, which `submission` writes.
"""
