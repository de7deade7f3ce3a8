"""Emulated networks: a network namespace for each rank and each switch of one machine, links with a rate each.

`network` starts one and is what others use, `keeper` is the process that it lives and dies with, `links` makes
interfaces and token buckets, `measure` and `verify` see that they carry what was asked, `ability` says what is
missing here, `standing` is a network that stays until it is taken down.  `doctor`, `launch` and `cli` import it.
"""
