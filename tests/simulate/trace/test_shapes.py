"""Tests of results that are recreated from their shape alone: only tensors that fill their storage."""

from __future__ import annotations

import torch

from repro.simulate.trace.shapes import UNKNOWN_RESULT, _made, _shape


def test_a_tensor_that_fills_its_storage_is_recreated() -> None:
    for full in (torch.empty(2, 3, device="meta"), torch.empty(4, 5, dtype=torch.half, device="meta").t()):
        known = _shape(full)
        assert known == (full.shape, full.stride(), full.dtype)
        recreated = _made(known)
        assert (recreated.shape, recreated.stride(), recreated.dtype, recreated.device) == (
            *(full.shape, full.stride(), full.dtype, full.device),
        )
    pair = _shape((torch.empty(2, device="meta"), None))
    assert pair == (tuple, ((torch.Size([2]), (1,), torch.float32), None))
    assert _made(pair)[1] is None


def test_views_and_tensors_with_data_are_not_recreated() -> None:
    wide = torch.empty(4, 6, device="meta")
    for value in (wide[:2], wide[:, :3], wide[:0], torch.empty(3), 7):
        assert _shape(value) is UNKNOWN_RESULT
    assert _shape((torch.empty(2, device="meta"), wide[:2])) is UNKNOWN_RESULT
