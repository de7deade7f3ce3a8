"""`repro.parallelize`: data parallelism and ZeRO 1-3 for a user's own module and optimizer.

`parallelize` wraps, `loop` is what happens at the forward and backward passes and the steps of a stock training loop,
`gradients` what such a loop finds at `p.grad`, `loss_scaling` what a GradScaler does, `step_agreement` what ranks tell
each other once a step, `module_states` and `optimizer_states` cut and join states, `refusals` is what would train
wrongly.
`repro` itself imports it, for `repro.parallelize`.
It has another name than its function, since a package `repro.parallelize` would hide that.
"""
