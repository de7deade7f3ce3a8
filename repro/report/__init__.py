"""Output of experiment records and judged claims: the HTML report, figures, exports, and the text that commands print.

`evidence` reads a folder of records and judges the published claims with them, for all other modules.
"""
