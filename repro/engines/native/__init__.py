"""The suite's own training step, its learning rate and its checkpoints."""
