"""ZeRO-R, what is left beside the model states (1910.02054 sec. 6).

P_a and P_a+cpu are `partitioned_activations`, C_B is `constant_buffers`, M_D is `defragmentation`. The rest of
`parallel` and `train` import it.
"""
