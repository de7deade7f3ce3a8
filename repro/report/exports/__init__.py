"""Claims and records for programs, papers and notebooks, without figures.

`tables` is `repro export`, `artifact` the artifact appendix, and `compare` the difference of two stores.
"""
