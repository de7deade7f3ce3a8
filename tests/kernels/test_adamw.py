"""Tests of AdamW over flat shards against torch.optim.AdamW in fp64 and fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro.kernels import adamw, adamw_

OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}


def shards(*sizes: int) -> list[Tensor]:
    return [torch.randn(size) for size in sizes]


def torch_adamw(
    start: list[Tensor], grads: list[list[Tensor]], lr: list[float], dtype: torch.dtype
) -> list[Tensor]:
    params = [torch.nn.Parameter(p.detach().clone().to(dtype)) for p in start]
    optimizer = torch.optim.AdamW(
        params, lr=1.0, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, foreach=False
    )
    for step_grads, rate in zip(grads, lr, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("copied", [False, True], ids=["", "copies"])
def test_adamw_equals_torchs_with_a_skipped_step(
    dtype: torch.dtype, scaled: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CPU_CHUNK_ELEMENTS", 50)
    masters = shards(130, 1, 50, 0)
    start = [m.clone() for m in masters]
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(m) for m in masters] for _ in range(2))
    copies = [m.to(dtype) for m in masters] if copied else []
    scale = torch.tensor(1024.0) if scaled else None
    lr = [1e-2 / (1 + i) for i in range(5)]
    used: list[list[Tensor]] = []
    for i, rate in enumerate(lr):
        grads = [(torch.randn_like(m) * (1024 if scaled else 1)).to(dtype) for m in masters]
        used.append([g.double() / (1024 if scaled else 1) for g in grads])
        arguments = {**OPTIONS, "lr": torch.tensor(rate), "step": torch.tensor(i + 1.0), "grad_scale": scale}
        if i == 3:
            before = [t.clone() for t in (*masters, *exp_avgs, *exp_avg_sqs, *copies)]
            bad = [torch.full_like(g, float("inf")) for g in grads]
            adamw_(masters, bad, exp_avgs, exp_avg_sqs, copies, found_inf=torch.tensor(1.0), **arguments)
            for a, b in zip((*masters, *exp_avgs, *exp_avg_sqs, *copies), before, strict=True):
                assert torch.equal(a, b)
        adamw_(masters, grads, exp_avgs, exp_avg_sqs, copies, found_inf=torch.tensor(0.0), **arguments)
    expected = torch_adamw(start, used, lr, torch.float64)
    for master, e in zip(masters, expected, strict=True):
        torch.testing.assert_close(master.double(), e, rtol=1e-5, atol=1e-6)
    for copy, master in zip(copies, masters, strict=copied):
        assert torch.equal(copy, master.to(dtype))


def test_fused_and_reference_agree(dtype: torch.dtype) -> None:
    first = [
        shards(33, 7),
        [g.to(dtype) for g in shards(33, 7)],
        shards(33, 7),
        [t.square() for t in shards(33, 7)],
    ]
    second = [[t.clone() for t in group] for group in first]
    arguments = {**OPTIONS, "lr": torch.tensor(3e-3), "step": torch.tensor(4.0)}
    for found in (0.0, 1.0):
        flags = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(found)}
        adamw_(*first, [], **arguments, **flags)
        first[1] = [g.clone() for g in second[1]]  # gradients may be overwritten
        adamw.reference(*second, [], **arguments, **flags)
        for group in (0, 2, 3):
            for a, b in zip(first[group], second[group], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [adamw_, partial(adamw_, plain=True), adamw.reference])
def test_epsilon_is_added_outside_the_root(function: Callable[..., None]) -> None:
    """After one step, the bias-corrected moments are g and g^2, so p becomes p (1 - lr wd) - lr g / (|g| + eps)."""
    master, first, second = torch.ones(1), torch.zeros(1), torch.zeros(1)
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 0.25, "weight_decay": 0.1}
    scalars = {"step": torch.tensor(1.0), "lr": torch.tensor(0.5)}
    nothing = {"grad_scale": None, "found_inf": None}
    function([master], [torch.tensor([0.75])], [first], [second], [], **settings, **scalars, **nothing)
    assert master.item() == pytest.approx(0.95 - 0.5 * 0.75)
    assert (first.item(), second.item()) == pytest.approx((0.075, 0.05 * 0.5625))


def test_parameters_are_written_without_autograd() -> None:
    master, copy = torch.randn(5, requires_grad=True), torch.randn(5).bfloat16().requires_grad_()
    zeros = [[torch.zeros(5)] for _ in range(2)]
    adamw_([master], [torch.ones(5)], *zeros, [copy], step=torch.tensor(1.0), lr=torch.tensor(0.1), **OPTIONS)
    assert master.grad_fn is None
    assert torch.equal(copy, master.bfloat16())


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_adamw_of_any_sizes_and_chunks(sizes: list[int], chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    masters, grads = shards(*sizes), [g.bfloat16() for g in shards(*sizes)]
    moments = [[torch.zeros_like(m) for m in masters] for _ in range(2)]
    expected = torch_adamw(masters, [[g.float() for g in grads]], [0.01], torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "CPU_CHUNK_ELEMENTS", chunk)
        adamw_(masters, grads, *moments, [], step=torch.tensor(1.0), lr=torch.tensor(0.01), **OPTIONS)
    for a, e in zip(masters, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_mismatched_lists_are_refused() -> None:
    one, scalars = [torch.ones(3)], {"step": torch.tensor(1.0), "lr": torch.tensor(0.1), **OPTIONS}
    with pytest.raises(ValueError, match="per master"):
        adamw_(one, [], one, one, [], **scalars)
    with pytest.raises(ValueError, match="shard 0"):
        adamw_(one, [torch.ones(4)], one, one, [], **scalars)
    with pytest.raises(ValueError, match="per master"):
        adamw_([], [], [], [], [], **scalars)
