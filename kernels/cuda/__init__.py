"""Bindings of the operators' CUDA kernels, which NVRTC compiles at the first call.

The sources are `kernels/*.cu`. The operators call the bindings through `dispatch`, and the tests run the same bindings
and sources on a CPU.
"""
