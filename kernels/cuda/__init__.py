"""Compilation of the CUDA sources `kernels/*.cu` by NVRTC at the first call, and launches of their kernels.

Tests also compile the same sources for a CPU.
"""
