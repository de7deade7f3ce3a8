"""Output for readers: the page, figures, exports and the text of commands, drawn from records and judged claims.

`evidence` reads and judges a store for all modules. `export` is `repro export`, `artifact` the artifact appendix, and
`compare` the difference of two stores. Only `cli` and the notebooks import this package.
"""
