"""Tests of the CUDA source of AdamW on the CPU, against the fp64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import adamw
from repro.kernels import adamw as binding
from repro.kernels.cuda.program import Unavailable
from tests.kernels.on_cpu import Host, placed

OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}


def run(
    host: Host, groups: list[list[Tensor]], step: float, scale: float | None, found: float | None
) -> list[list[Tensor]]:
    """Update the groups with the binding, and return the groups that the fp64 reference updates."""
    wide = [[t.double() for t in group] for group in groups]
    scalars = [None if v is None else torch.tensor(v) for v in (step, 3e-3, scale, found)]
    precise = dict(
        zip(
            ("step", "lr", "grad_scale", "found_inf"),
            (t if t is None else t.double() for t in scalars),
            strict=True,
        )
    )
    adamw.reference(*wide, **precise, **OPTIONS)  # type: ignore[arg-type]
    host.call(binding.launch_adamw_, *groups, *scalars[:2], *OPTIONS.values(), *scalars[2:])  # type: ignore[arg-type]
    return wide


def compare(groups: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for which in (0, 2, 3):
        for a, e in zip(groups[which], expected[which], strict=True):
            torch.testing.assert_close(a.double(), e, rtol=2e-6, atol=1e-6, equal_nan=True)
    for copy, master in zip(groups[4], groups[0], strict=bool(groups[4])):
        torch.testing.assert_close(copy, master.to(copy.dtype), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=12)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 7, 8, 30, 1029, 8192, 8195]), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    step=st.integers(1, 2000),
    found=st.sampled_from([None, 0.0, 1.0]),
    copied=st.booleans(),
    agree=st.booleans(),
)
def test_adamw_of_any_sizes_and_alignments(
    host: Host,
    shapes: list[tuple[int, int]],
    kind: torch.dtype,
    step: int,
    found: float | None,
    copied: bool,
    agree: bool,
) -> None:
    copied = copied or kind != torch.float32
    scale = None if found is None else 64.0
    torch.manual_seed(step)
    groups: list[list[Tensor]] = [[], [], [], [], []]
    checks = []
    for size, offset in shapes:
        gradient = (scale or 1.0) * torch.randn(size)
        values = [torch.randn(size), gradient.to(kind), torch.randn(size), torch.rand(size)]
        values += (
            [torch.zeros(size, dtype=torch.float16 if kind == torch.float32 else kind)] if copied else []
        )
        for i, value in enumerate(values):
            tensor, check = placed(value, offset + (0 if agree else i))
            groups[i].append(tensor)
            checks.append(check)
    expected = run(host, groups, float(step), scale, found)
    compare(groups, expected)
    for check in checks:
        check()


def test_many_shards_need_several_launches(host: Host) -> None:
    count = binding.MAX_SHARDS + 3
    groups = [[torch.rand(5 + i) for i in range(count)] for _ in range(4)]
    expected = run(host, [*groups, []], 2.0, None, None)
    compare([*groups, []], expected)
    assert host.launched == ["adamw", "adamw"]


def test_mixed_dtypes_and_non_finite_gradients(host: Host) -> None:
    groups = [[torch.randn(40), torch.randn(9)] for _ in range(3)]
    groups += [[torch.rand(40), torch.rand(9)]]
    groups[1][0][[3, 17]] = torch.tensor([float("nan"), float("inf")])
    groups[1][1] = groups[1][1].bfloat16()
    groups += [[torch.zeros(40).half(), torch.zeros(9).bfloat16()]]
    expected = run(host, groups, 1.0, 2.0, 0.0)
    compare(groups, expected)
    assert host.launched == ["adamw", "adamw"]


def test_adamw_refuses_other_dtypes_and_strides(host: Host) -> None:
    ok = [torch.ones(4)]
    scalars = (torch.tensor(1.0), torch.tensor(0.1), *OPTIONS.values(), None, None)
    with pytest.raises(Unavailable, match="fp32"):
        host.call(binding.launch_adamw_, [torch.ones(4).double()], ok, ok, ok, [], *scalars)
    with pytest.raises(Unavailable, match="contiguous"):
        host.call(binding.launch_adamw_, [torch.ones(8)[::2]], ok, ok, ok, [], *scalars)
    with pytest.raises(Unavailable, match="float64"):
        host.call(binding.launch_adamw_, ok, [torch.ones(4).double()], ok, ok, [], *scalars)
    assert not host.launched
