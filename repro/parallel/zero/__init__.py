"""ZeRO's partitioning of model states (1910.02054 sec. 5): flat parameter buffers, of which each data-parallel rank
owns a shard.

| paper | stage | partitioned state | module |
|---|---|---|---|
| - | 0 | none: plain data parallelism | `grad_reduce` |
| P_os | 1 | optimizer states | `optimizer` |
| P_os+g | 2 | and gradients | `grad_reduce`, `optimizer` |
| P_os+g+p | 3 | and parameters | `unshard`, `backward_schedule` |

`stages` assembles the parts of a stage for a module, for the native engine and for `repro.parallelize`.
"""
