"""`repro report`: one self-contained HTML page of verdicts, evidence and figures, made from a store.

`build` writes the page, and `context` fills its templates.
"""
