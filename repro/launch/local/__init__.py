"""Ranks as processes of this machine: `launch` starts them, `once` runs one job whose results are taken at once.

`room` says what is too large to start.  The rest of `launch` and `calibrate` import it.
"""
