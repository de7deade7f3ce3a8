"""What became of submissions: where each case is, its logs, what is to be cancelled or was lost without a word.

`registry` keeps the submissions of a store.  It imports `allocation` and `site`; `submission` may import it.
"""
