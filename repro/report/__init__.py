"""Output for readers: the page, figures, exports and the text of commands, drawn from records and judged claims.

`evidence` reads and judges a store for all modules. `export` and `compare` are commands.
"""
