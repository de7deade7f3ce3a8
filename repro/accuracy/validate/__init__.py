"""How far predictions are off: from published throughput (`published`), from this machine's runs (`machine`).

`unknowns` says which numbers decide, `measurable` what measures them, `implied` what sources make of them, `conformal`
how far the model itself is off.  `report` and `cli` import it.
"""
