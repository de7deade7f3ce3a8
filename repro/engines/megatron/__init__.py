"""megatron-core trains the same model: its layers, schedules, data parallelism and optimizer, our weights and data.

`repro.engines` imports `engine`, and with it the library, only when an experiment asks for it.

| file | what |
|---|---|
| `engine` | the step, under the `Engine` interface |
| `settings` | an experiment as megatron-core's three configurations |
| `model` | its GPTModel in the parts that a rank has, with torch's attention |
| `passes` | what a stage does, as the library tells it |
| `weights` | its parameters in our names and shapes, and back |
| `exchange` | what the library keeps in its modules, there only while the engine works |
| `messages` | what is sent to another stage stays in memory until it has been |
| `shim` | what lets it run on CPUs |
"""
