"""The operators' CUDA kernels: sources beside the references (`kernels/*.cu`), compiled when they are first called.

`compile` turns a source into machine code by NVRTC, `cache` keeps it on disk, `device` loads and launches it,
`dispatch` decides between kernel and reference, `lists` cuts lists of tensors into launches; `resources` reads what a
`program` takes of a GPU, `occupancy` what that leaves. The other modules are the bindings, one of each of `families`:
they take a `Launcher`, so that the tests run the same bindings and sources on a CPU. The operators beside this folder
and `doctor` import it.
"""
