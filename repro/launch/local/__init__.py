"""Ranks as processes of the local machine.

`launch` starts and watches them, and `once` runs one job and returns its results. `room` estimates whether an
experiment fits the machine.
"""
