"""The suite's own training step, its learning rate schedule and its checkpoints.

`engine` is the step that runs on real devices and that `simulate` traces on shapes. `model_part` is a rank's part
of the model, and other engines reuse its micro-batches.
"""
