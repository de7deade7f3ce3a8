"""ZeRO's model states (1910.02054 sec. 5): parameters in flat buffers, of which each data-parallel rank owns a shard.

| paper | stage | what is partitioned | where |
|---|---|---|---|
| - | 0 | nothing: plain data parallelism | `grad_reduce` |
| P_os | 1 | optimizer states | `optimizer`, `gather_updated` |
| P_os+g | 2 | and gradients | `grad_reduce`, `gather_updated` |
| P_os+g+p | 3 | and parameters | `unshard`, `passes` |

For a module that is not ours, `released` refuses reads of parameters that stage 3 has freed, and `same_units` ranks
that gather different ones. `partition` cuts parameters into buckets and shards, `flat_buffer` is one bucket,
`flat_parameters` what it and frozen parameters have in common, `units` says what of a module is gathered at once,
`passed` finds the tensors in what modules take and return, `looks` knows backward passes that bring no gradients,
`stages` puts the parts of a stage together for a module. `train` and `wrap` import it.
"""
