"""Published claims (the ledger), closed forms of the papers, the tolerance rule, and the verdicts about the claims.

Verdicts read stored records (`results`) and never run an experiment. The ledger is the TOML files of this package.
"""
