"""megatron-core's layers, schedules, data parallelism and optimizer on the suite's weights and data, behind the engine
interface.

| module | content |
|---|---|
| `engine` | the step, and the passes of a stage |
| `model` | configurations and parts of its GPTModel on a rank, and conversion between its parameters and the suite's |
| `exchange` | the library's module variables, and replacements of its functions |
"""
