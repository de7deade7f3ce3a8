"""The GPT and its layers, their initial weights, parameter and FLOP counts, and token streams.

The layers are built on `parallel` and `kernels`, and every engine trains this model. `counts` does not
import torch.
"""
