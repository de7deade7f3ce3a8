"""Output of records and judged claims: the site of `repro report`, figures, exports, and the text of commands.

`evidence` reads a store of records and judges the claims with it, for all other modules.
"""
