"""Distribution of a training step over ranks: mesh, collectives, tensor, context and pipeline parallelism, ZeRO and
ZeRO-R.

Every collective goes through `comm` and is counted in `ledger`. The code runs on tensors of any device, including
`meta`, for real steps and simulations alike.
"""
