"""The ledger of published claims (TOML beside this file), the closed forms, the tolerance rule and the judge.

`reader` makes a `ledger` of the files, `expression` evaluates what a row says with `formulas` and `records`,
`tolerance` is the one rule, `judge` applies it.  Claims read records and never run anything.  `report`, `validate`
and `cli` import it.
"""
