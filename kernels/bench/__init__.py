"""What the kernels are measured with on a GPU: `make bench-gpu`.

`clock` times what a device does, `case` is one comparison, `cases` has them all, `table` says how near to the
memory's own speed it comes. The tests run all of it on a CPU with a clock of the CPU, to try the logic; those times
mean nothing. Nothing of the product imports it.
"""
