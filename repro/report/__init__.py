"""What a store and the ledger say, for readers: a page, its figures, and exports for programs and papers.

`evidence.py` reads the store once and judges it, `verdicts.py` puts a judged claim in words, `origins.py` says where
records come from.  Above these, `figures/` draws, `page/` writes `repro report`, and `exports/` writes tables, the
artifact appendix and comparisons.  Nothing here runs anything but `exports/what_if.py`.  Only `cli` and the notebooks
may import it.
"""
