"""Emulated networks: a network namespace for each rank and each switch of one machine, links with a rate each.

`network` starts one and is what others use, `keeper` is the process that it lives and dies with, `namespaces` and
`links` make what it consists of, of `frames` of some size, `measure` and `verify` see that it carries what was asked,
`products` how fast ranks compute, `ability` says what is missing here, `standing` is a network that stays until it is
taken down.  `simulate` and higher import it.
"""
