"""Tests of AdamW over flat shards against torch.optim.AdamW and against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import adamw, adamw_
from tests.kernels.on_cpu import Host, placed

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    ("dtype", "scale", "copied"),
    [(FP32, 1.0, False), (FP32, 1024.0, False), (BF16, 1.0, True), (FP16, 1024.0, True), (BF16, 1.0, False)],
    ids=str,
)
def test_adamw_equals_torchs_with_a_skipped_step(
    dtype: torch.dtype, scale: float, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CPU_CHUNK_ELEMENTS", 50)
    masters = [torch.randn(size) for size in (130, 1, 50, 0)]
    expected = [torch.nn.Parameter(m.double()) for m in masters]
    optimizer = torch.optim.AdamW(expected, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, foreach=False)
    moments = [[torch.zeros_like(m) for m in masters] for _ in range(2)]
    copies = [m.to(dtype) for m in masters] if copied else []
    states = (*masters, *moments[0], *moments[1], *copies)
    update = partial(adamw_, masters, exp_avgs=moments[0], exp_avg_sqs=moments[1], copies=copies, **OPTIONS)
    for i in range(5):
        grads = [(torch.randn_like(m) * scale).to(dtype) for m in masters]
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        scalars = {"lr": torch.tensor(1e-2 / (1 + i)), "step": torch.tensor(i + 1.0)}
        scalars["grad_scale"] = None if scale == 1 else torch.tensor(scale)
        if i == 3:
            before = [t.clone() for t in states]
            bad = [torch.full_like(g, float("inf")) for g in grads]
            update(grads=bad, found_inf=torch.tensor(1.0), **scalars)
            assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))
        for p, g in zip(expected, grads, strict=True):
            p.grad = g.double() / scale
        optimizer.step()
        update(grads=grads, found_inf=torch.tensor(0.0), **scalars)
    for master, p in zip(masters, expected, strict=True):
        torch.testing.assert_close(master.double(), p.detach(), rtol=1e-5, atol=1e-6)
    for copy, master in zip(copies, masters, strict=copied):
        assert torch.equal(copy, master.to(dtype))


@pytest.mark.parametrize("function", [adamw_, partial(adamw_, plain=True), adamw.reference])
def test_epsilon_is_added_outside_the_root(function: Callable[..., None]) -> None:
    """After one step, the bias-corrected moments are g and g^2, so p becomes p (1 - lr wd) - lr g / (|g| + eps)."""
    master, first, second = torch.ones(1), torch.zeros(1), torch.zeros(1)
    scalars = {"step": torch.tensor(1.0), "lr": torch.tensor(0.5), "grad_scale": None, "found_inf": None}
    options = {**OPTIONS, "eps": 0.25}
    function([master], [torch.tensor([0.75])], [first], [second], [], **options, **scalars)
    assert master.item() == pytest.approx(0.95 - 0.5 * 0.75)
    assert (first.item(), second.item()) == pytest.approx((0.075, 0.05 * 0.5625))


def test_parameters_are_written_without_autograd() -> None:
    master, copy = torch.randn(5, requires_grad=True), torch.randn(5).bfloat16().requires_grad_()
    zeros = [[torch.zeros(5)] for _ in range(2)]
    adamw_([master], [torch.ones(5)], *zeros, [copy], step=torch.tensor(1.0), lr=torch.tensor(0.1), **OPTIONS)
    assert master.grad_fn is None
    assert torch.equal(copy, master.bfloat16())


def assert_update_matches_reference(groups: list[list[Tensor]], **scalars: float | None) -> None:
    """Update masters, gradients, moments and copies, and compare them with the update in fp64."""
    wide = [[t.double() for t in group] for group in groups]
    given = {name: None if value is None else torch.tensor(value) for name, value in scalars.items()}
    adamw_(*groups, **given, **OPTIONS)  # type: ignore[arg-type]
    adamw.reference(*wide, **{n: t if t is None else t.double() for n, t in given.items()}, **OPTIONS)
    for which in (0, 2, 3):
        for a, e in zip(groups[which], wide[which], strict=True):
            torch.testing.assert_close(a.double(), e, rtol=2e-6, atol=1e-6, equal_nan=True)
    for copy, master in zip(groups[4], groups[0], strict=bool(groups[4])):
        torch.testing.assert_close(copy, master.to(copy.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("implementation")
@settings(max_examples=15)
@given(
    st.builds(
        SimpleNamespace,
        shapes=st.lists(
            st.tuples(st.sampled_from([0, 1, 3, 7, 8, 30, 1029, 8192, 8195]), st.integers(0, 3)),
            min_size=1,
            max_size=4,
        ),
        chunk=st.integers(20, 9000),
        kind=st.sampled_from([FP32, FP16, BF16]),
        step=st.integers(1, 2000),
        found=st.sampled_from([None, 0.0, 1.0]),
        copied=st.booleans(),
        agree=st.booleans(),
    )
)
def test_adamw_of_any_sizes_alignments_and_chunks(drawn: SimpleNamespace) -> None:
    kind, copied = drawn.kind, drawn.copied or drawn.kind != FP32
    scale = None if drawn.found is None else 64.0
    torch.manual_seed(drawn.step)
    groups: list[list[Tensor]] = [[], [], [], [], []]
    checks = []
    for size, offset in drawn.shapes:
        gradient = (scale or 1.0) * torch.randn(size)
        values = [torch.randn(size), gradient.to(kind), torch.randn(size), torch.rand(size)]
        values += [torch.zeros(size, dtype=FP16 if kind == FP32 else kind)] if copied else []
        for i, value in enumerate(values):
            tensor, check = placed(value, offset + (0 if drawn.agree else i))
            groups[i].append(tensor)
            checks.append(check)
    scalars = {"step": float(drawn.step), "lr": 3e-3, "grad_scale": scale, "found_inf": drawn.found}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "CPU_CHUNK_ELEMENTS", drawn.chunk)
        assert_update_matches_reference(groups, **scalars)
    for check in checks:
        check()


def test_many_shards_need_several_launches(implementation: Host | None) -> None:
    groups = [[torch.rand(5 + i) for i in range(adamw.MAX_SHARDS + 3)] for _ in range(4)]
    assert_update_matches_reference([*groups, []], step=2.0, lr=3e-3, grad_scale=None, found_inf=None)
    assert implementation is None or implementation.launched == ["adamw", "adamw"]


def test_mixed_dtypes_and_non_finite_gradients(implementation: Host | None) -> None:
    groups = [[torch.randn(40), torch.randn(9)] for _ in range(3)]
    groups += [[torch.rand(40), torch.rand(9)]]
    groups[1][0][[3, 17]] = torch.tensor([float("nan"), float("inf")])
    groups[1][1] = groups[1][1].bfloat16()
    groups += [[torch.zeros(40).half(), torch.zeros(9).bfloat16()]]
    assert_update_matches_reference(groups, step=1.0, lr=3e-3, grad_scale=2.0, found_inf=0.0)
    assert implementation is None or implementation.launched == ["adamw", "adamw"]


def test_mismatched_lists_are_refused() -> None:
    one, scalars = [torch.ones(3)], {"step": torch.tensor(1.0), "lr": torch.tensor(0.1), **OPTIONS}
    with pytest.raises(ValueError, match="per master"):
        adamw_(one, [], one, one, [], **scalars)
    with pytest.raises(ValueError, match="shard 0"):
        adamw_(one, [torch.ones(4)], one, one, [], **scalars)
    with pytest.raises(ValueError, match="per master"):
        adamw_([], [], [], [], [], **scalars)
