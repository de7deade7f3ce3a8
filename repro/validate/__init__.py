"""How far predictions are off: from published throughput (`published`), from this machine's runs (`machine`).

`report` and `cli` import it.
"""
