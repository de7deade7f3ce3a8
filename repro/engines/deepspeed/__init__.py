"""DeepSpeed's engine, ZeRO and activation checkpointing on the suite's GPT, behind the engine interface.

| module | content |
|---|---|
| `engine` | the step, the import of DeepSpeed, its configuration and `mpu`, its module variables |
| `model_states` | the GPT with DeepSpeed's checkpointing, initial values, and the states of DeepSpeed's optimizers |
"""
