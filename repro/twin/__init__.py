"""Small twins of published experiments that keep their dimensionless numbers on a slower machine and network.

`shape` puts a layout on fewer ranks, `scaling` makes model, batch and links, `emulated` is the system that the time
model predicts the twin on, `derive` puts them together; `numbers` compares original and twin, `matter` says what
each number that is not kept does to the ratio, `suite` writes a suite that `repro run` runs.  The derivation is in
docs/windtunnel.md.  Only `cli` and higher import it.
"""
