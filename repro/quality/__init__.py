"""Weights in and out, and evaluation of their quality by published protocols.

`weights` converts weights, and `evaluate` scores them on ranks that `launch` starts.
"""
