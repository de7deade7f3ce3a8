"""Engine `deepspeed`: DeepSpeed's step, ZeRO and activation checkpointing on the suite's GPT.

`engine` configures DeepSpeed and runs the step, and `model_states` builds the GPT and finds the states of DeepSpeed's
optimizers.
"""
