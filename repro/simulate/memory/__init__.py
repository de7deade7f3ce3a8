"""Memory of a traced step: live bytes at every moment, and the bytes that PyTorch's caching allocator reserves.

`replay` runs a trace through the allocator model. `simulate.step` and `simulate.plan` call it.
"""
