"""`repro report`: a site of static HTML pages with verdicts, evidence and figures from a results folder.

`build` writes the files of the site, and `context` provides the values for their templates.
"""
