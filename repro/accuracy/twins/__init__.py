"""Small twins of published experiments that keep their dimensionless numbers on a slower machine and network.

`originals` finds what is compared, `shape` puts a layout on fewer ranks, `scaling` makes model, batch and links,
`derive` puts them together; `numbers` compares original and twin, `matter` says what each number that is not kept does
to the ratio, `suite` writes a suite that `repro run` runs.  The derivation is in docs/twins.md.  Only `cli` imports it.
"""
