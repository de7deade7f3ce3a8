"""Twins: small versions of published experiments that keep their dimensionless numbers on a slower machine and network.

`derive` builds a twin and `suite` writes it as a suite file. docs/twins.md has the derivation.
"""
