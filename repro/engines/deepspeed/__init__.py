"""DeepSpeed's engine, ZeRO and activation checkpointing on the suite's GPT, behind the engine interface.

| module | content |
|---|---|
| `config` | the DeepSpeed configuration of a layout and a training |
| `library` | the import of DeepSpeed, and isolation of its module-level state |
| `topology` | the tensor-parallel groups as DeepSpeed's `mpu` |
| `model` | the GPT with DeepSpeed's checkpointing, values and optimizer |
| `states` | the tensors of its optimizers, by category |
| `engine` | the step |
"""
