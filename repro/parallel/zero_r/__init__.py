"""ZeRO-R, what is left beside the model states (1910.02054 sec. 6).

| paper | layout | what it bounds | where |
|---|---|---|---|
| P_a, P_a+cpu | `pa`, `pa_cpu` | activation checkpoints | `partitioned_activations` |
| C_B | `cb` | buffers of fused communication | `constant_buffers` |
| M_D | `md` | holes between long and short lives | `defragmentation` |

The rest of `parallel` and `train` import it.
"""
