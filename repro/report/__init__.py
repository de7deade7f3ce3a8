"""Output for readers: the page, figures, exports and the text of commands, drawn from records and judged claims.

`evidence` reads a store and judges it for all of them. Only `cli` and the notebooks import this package.
"""
