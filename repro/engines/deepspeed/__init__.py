"""DeepSpeed itself on the suite's GPT: its engine, its ZeRO, its activation checkpointing, behind our interface.

| file | what a reader finds there |
|---|---|
| `config` | the DeepSpeed configuration that a layout and a training stand for |
| `library` | the import of DeepSpeed, and how its module-level state is kept to one experiment |
| `topology` | our tensor-parallel groups as DeepSpeed's `mpu` |
| `model` | the GPT with DeepSpeed's checkpointing, values and optimizer |
| `states` | what its optimizers hold, found and marked |
| `engine` | the step |

Only `repro.engines` imports it.
"""
