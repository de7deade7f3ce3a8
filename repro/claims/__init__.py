"""The ledger of published claims, the closed forms, the tolerance rule and the judge that decides verdicts.

Claims read records of `results` and never run an experiment. The ledger is the TOML files of this package.
"""
