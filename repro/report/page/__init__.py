"""`repro report`: one self-contained page of verdicts, evidence and figures, drawn from the store alone.

`build.py` writes it, `context.py` what the templates beside it are filled with, `record_tables.py` the tables of
records, `notebooks.py` the notebooks of reports/ as pages.  Only `cli` may import it.
"""
