"""megatron-core's layers, schedules, data parallelism and optimizer on the suite's weights and data, behind the engine
interface.

| module | content |
|---|---|
| `engine` | the step |
| `settings` | the three configurations of megatron-core for an experiment |
| `model` | the parts of its GPTModel on a rank, with torch's attention |
| `passes` | forward and backward passes of a stage |
| `weights` | conversion between its parameters and the suite's |
| `exchange` | isolation of the library's module-level state |
| `messages` | lifetime of tensors that are sent to another stage |
| `shim` | replacements that let the library run on CPUs |
"""
