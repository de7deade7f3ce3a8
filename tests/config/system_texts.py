"""Sections of system files, from which tests write complete files."""

NODES = """
devices_per_node = { value = 4, source = "here" }
nodes = { value = 2, source = "here" }
context_bytes = { value = 1e9, source = "here" }
host_memory_bytes = { value = 64e9, source = "here" }
"""
PRODUCTS = """
[device.operators."aten.mm"]
fixed_s = 2e-6
per_flop_s = 1e-14
"""
PROVENANCE = """
[provenance]
date = "2026-01-01"
torch = "2.6.0"
ranks = 4
repeats = 5
facts = { cores = 4, processor = "X" }
"""
