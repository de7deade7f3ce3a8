"""The ledger of published claims (TOML beside this file), the closed forms, the tolerance rule and the judge.

`reader` makes a `ledger` of the files, `expression` evaluates what a row says with `formulas` and `records`, `inputs`
tells a test from a source's own numbers, `tolerance` is the one rule, `finding` holds evidence to it, `judge` gives
verdicts and `things` counts what is independent; `again` asks of other machines.  Claims read records and never run
anything.  `report`, `validate` and `cli` import it.
"""
