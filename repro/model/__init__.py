"""The GPT and its layers, their initial weights, parameter and FLOP counts, and token streams.

The layers are built on `parallel` and `kernels`, and every engine trains this model. `parameters`, `flops` and `states`
count without torch.
"""
