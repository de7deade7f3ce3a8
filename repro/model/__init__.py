"""The GPT that all engines train: layers, initial weights, counts of parameters and FLOP, and token streams.

The layers use `parallel` and `kernels`; `counts` does not import torch.
"""
