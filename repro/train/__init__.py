"""The training step and its schedule: one step, whatever the layout, the device or the transport."""
