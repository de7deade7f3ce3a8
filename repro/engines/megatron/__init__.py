"""megatron-core's layers, schedules, data parallelism and optimizer on the suite's weights and data, behind the engine
interface.

| module | content |
|---|---|
| `engine` | the step, and the passes of a stage |
| `settings` | the three configurations of megatron-core for an experiment |
| `model` | the parts of its GPTModel on a rank, and conversion between its parameters and the suite's |
| `exchange` | isolation of the library's module-level state, and replacements of its functions |
"""
