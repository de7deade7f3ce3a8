"""Twins: published experiments scaled down to a slower machine and network with the same dimensionless numbers.

`derive` builds a twin and `suite` writes it as a suite file. docs/twins.md has the derivation.
"""
