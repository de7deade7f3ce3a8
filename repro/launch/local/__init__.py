"""Ranks as processes of this machine: `launcher` starts them, `once` runs one job whose results are taken at once.

`processes` is what any launcher knows of a rank's process.  The rest of `launch` and `calibrate` import it.
"""
