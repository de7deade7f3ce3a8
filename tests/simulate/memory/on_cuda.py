"""Run the actions on standard input with torch's allocator; `test_allocator_cuda` starts this program.

Input: JSON `{"fraction": share of the device or null, "actions": [[id, bytes] or [id]]}`, an allocation or a
release. Output: JSON `[[allocated, reserved, num_alloc_retries, out of memory], ...]`, one row per action.
"""

from __future__ import annotations

import json
import sys

import torch

NAMES = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries")

if __name__ == "__main__":
    request = json.load(sys.stdin)
    torch.cuda.init()
    if request["fraction"] is not None:
        torch.cuda.set_per_process_memory_fraction(request["fraction"])
    live: dict[int, torch.Tensor] = {}
    rows = []
    for id, *size in request["actions"]:
        out_of_memory = False
        live.pop(id, None)
        if size:
            try:
                live[id] = torch.empty(size[0], dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                out_of_memory = True
        stats = torch.cuda.memory_stats()
        rows.append([*(stats[name] for name in NAMES), out_of_memory])
    json.dump(rows, sys.stdout)
