"""Engine `megatron`: layers, schedules, data parallelism and optimizer of megatron-core, with this suite's weights.

`engine` runs the step, `model` configures GPTModel and converts parameters, and `exchange` replaces module variables
and functions of the library during a call.
"""
