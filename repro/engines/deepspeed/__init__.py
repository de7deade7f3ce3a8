"""DeepSpeed's engine, ZeRO and activation checkpointing on the suite's GPT, behind the engine interface.

| module | content |
|---|---|
| `library` | the import of DeepSpeed, its configuration and `mpu`, isolation of its module-level state |
| `model` | the GPT with DeepSpeed's checkpointing, values and optimizer |
| `states` | the tensors of its optimizers, by category |
| `engine` | the step |
"""
