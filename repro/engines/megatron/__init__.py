"""Engine `megatron`: megatron-core's layers, schedules, data parallelism and optimizer on the suite's weights and data.

`engine` runs the step, `model` configures GPTModel and converts parameters, and `exchange` replaces module variables
and functions of the library during a call.
"""
