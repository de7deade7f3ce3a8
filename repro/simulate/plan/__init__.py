"""Which layouts there are, which fit, and which come first: `repro fit` and `repro plan`.

`candidates` lists layouts, `closed_form` rules out what model states alone exceed, `fit` searches the largest model,
`planner` answers for each, `plan` orders them, `grid` maps tp against pp. `cli` and `launch.fit` import it.
"""
