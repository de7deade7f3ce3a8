"""What a trace holds: live bytes at every moment, and what PyTorch's caching allocator reserves for them.

`live` follows bytes by category, `timeline` shortens them for a record, `allocator`, `pools` and `expandable` model the
allocator, `replay` runs a trace through it, `pinned` is host memory. `simulate.step` and `simulate.plan` import it.
"""
