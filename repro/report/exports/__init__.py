"""The judged ledger and the records for programs, papers and notebooks, without a page or a picture.

`tables.py` is `repro export`, `artifact.py` the appendix, `compare.py` what changed between two stores, and
`what_if.py` one simulated step for a notebook.  Only `cli` and the notebooks may import it.
"""
