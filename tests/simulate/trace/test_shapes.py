"""Which results of an operator are made again from their shape alone: those that fill their storage exactly."""

from __future__ import annotations

import torch

from repro.simulate.trace.shapes import UNKNOWN_RESULT, _made, _shape


def test_a_tensor_that_fills_its_storage_is_known_by_its_shape() -> None:
    for full in (torch.empty(2, 3, device="meta"), torch.empty(4, 5, dtype=torch.half, device="meta").t()):
        known = _shape(full)
        assert known == (full.shape, full.stride(), full.dtype)
        again = _made(known)
        assert (again.shape, again.stride(), again.dtype, again.device) == (
            *(full.shape, full.stride(), full.dtype, full.device),
        )
    pair = _shape((torch.empty(2, device="meta"), None))
    assert pair == (tuple, ((torch.Size([2]), (1,), torch.float32), None))
    assert _made(pair)[1] is None


def test_a_part_of_a_storage_or_a_tensor_with_data_is_not() -> None:
    wide = torch.empty(4, 6, device="meta")
    for part in (wide[:2], wide[:, :3], wide[:0], torch.empty(3), 7):
        assert _shape(part) is UNKNOWN_RESULT
    assert _shape((torch.empty(2, device="meta"), wide[:2])) is UNKNOWN_RESULT
