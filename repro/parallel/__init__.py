"""How a step is spread over ranks: ZeRO, ZeRO-R, pipelines, tensor and context parallelism, the collectives below.

`mesh` makes groups of ranks of a layout; every message goes through a `Group` of `comm`, which a `ledger` counts and
one of the `transports` carries; `connect` uses each before the first step.  `tensor` has Megatron's split linear
layers, `context` the keys and values of a split sequence, `recompute` activation checkpoints, `precision` loss
scaling, `storage` what memory is for. Tensors of any device will do, `meta` too: nothing here knows whether it is
measured or simulated.  Imports `config` and `kernels`; `models`, `train` and higher levels import it.
"""
