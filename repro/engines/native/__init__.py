"""The suite's own training step, its learning rate schedule and its checkpoints.

`engine` runs on real devices, and `simulate` traces it on `meta` tensors. `model_part` is a rank's part of the model,
with rules that all engines share.
"""
