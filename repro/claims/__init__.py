"""The ledger of published claims, the closed forms, the tolerance rule and the judge."""
