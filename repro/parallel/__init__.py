"""One file per idea: buckets, data parallelism, ZeRO, tensor parallelism, recomputation, collectives."""
