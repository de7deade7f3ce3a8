"""Engine `native`: this suite's own training step, learning rate schedule and checkpoints.

`engine` runs on real devices, and `repro.simulate` traces the step on `meta` tensors. `model_part` is a rank's part of
the model, with rules that all engines share.
"""
