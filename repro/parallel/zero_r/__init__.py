"""ZeRO-R: reduction of memory other than model states (1910.02054 sec. 6), selected by keys of the layout.

| paper | layout | reduced memory | module |
|---|---|---|---|
| P_a, P_a+cpu | `pa`, `pa_cpu` | activation checkpoints | `activation_checkpointing` |
| C_B | `cb` | buffers of fused communication | `constant_buffers` |
| M_D | `md` | fragmentation by short-lived tensors | `defragmentation` |
"""
