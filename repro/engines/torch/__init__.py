"""Engine `torch`: PyTorch's parallelism applied to this suite's GPT, as a baseline for the native engine.

`model` rebuilds the GPT from torch.nn modules, `parallelism` distributes it, and `engine` runs the step.
"""
