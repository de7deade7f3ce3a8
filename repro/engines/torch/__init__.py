"""PyTorch's own strategies on the suite's GPT, as a baseline for the native engine.

`model` rebuilds the GPT from torch.nn modules. `engine` combines data, tensor and pipeline parallelism, and
`repro.engines` imports it on request.
"""
