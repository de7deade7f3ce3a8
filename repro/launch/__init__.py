"""Run a suite: plan what the store lacks, start ranks, watch them, record how each experiment ended."""
