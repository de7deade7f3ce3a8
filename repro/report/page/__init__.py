"""`repro report`: a site of static HTML pages with verdicts, evidence and figures of a store.

`build` writes the files of the site, and `context` provides the values for their templates.
"""
