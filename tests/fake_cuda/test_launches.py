"""What a layer and micro-batch ask of a GPU, to the launch and the allocation; and that a captured pass is the same.

The numbers are worked out here from the operators of a layer, in bf16 on one rank, where gradients are added to those
of an earlier micro-batch.  A matrix's goes straight to its place in the bucket (`addmm`), a vector's is added there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fake_cuda.cases import LAYERS, SETS, Answers, audited, case, needs_compiler

pytestmark = [needs_compiler, pytest.mark.xdist_group("fake_cuda")]


class Asks(NamedTuple):
    """What one operator asks in forward, and in backward."""

    forward: dict[str, int]
    backward: dict[str, int]
    allocates: tuple[int, int]
    """How often memory is asked for in each."""


SUMS = "column_sums.column_sums"
FLASH, EFFICIENT = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient"))
LINEAR = Asks({"mm": 1}, {"mm": 1, "addmm": 1}, (1, 1))
"""Backward: the input's gradient, and the weight's."""
ADDS = Asks({}, {"add": 1}, (0, 1))
"""Gradients of two uses of one tensor."""
VECTOR = Asks({}, {"add_": 1}, (0, 0))
# The blocks' sums, and the gradient.
BIAS_SUM = Asks({}, {"column_sums.partial_sums": 1, SUMS: 1}, (0, 2))
TORCH_BIAS_SUM = Asks({}, {"sum": 1}, (0, 1))
# The result, its fp32 number a row, and torch's seed and offset of a dropout that there is none of; then dq, dk, dv.
ATTENTION = Asks({FLASH: 1}, {f"{FLASH}_backward": 1}, (4, 3))
TOGETHER = Asks({}, {"stack": 1}, (0, 1))
"""The gradients of q, k and v, or of k and v, in one tensor."""
# y, mean, rstd; dx, the blocks' sums, and the two vectors' gradients in one.
NORM = Asks({"layernorm.forward": 1}, {"layernorm.backward": 1, SUMS: 1}, (3, 3))
RMS = NORM._replace(allocates=(2, 3))
# y; dx, the blocks' sums, the bias's gradient.
GELU = Asks({"gelu.forward": 1}, {"gelu.backward": 1, SUMS: 1}, (1, 3))
SWIGLU = Asks({"glu.forward": 1}, {"glu.backward": 1}, (1, 1))
ROTARY = Asks({"rope.rotary": 1}, {"rope.rotary": 1}, (1, 1))
RESIDUAL = Asks({"dropout.forward": 1}, {}, (1, 0))
"""Without dropout the gradient passes as it is."""
DROPOUT = Asks({"dropout.forward": 1}, {"dropout.backward": 1, SUMS: 1}, (1, 3))

TORCH_NORM = Asks({"native_layer_norm": 1}, {"native_layer_norm_backward": 1}, (3, 3))
TORCH_GELU = Asks({"add": 1, "gelu_": 1}, {"add": 1, "gelu_backward": 1, "sum": 1}, (1, 2))
TORCH_RESIDUAL = Asks({"add": 1, "add_": 1}, {"sum": 1}, (1, 1))

BIASED = Asks({"addmm": 1}, {"mm": 1, "addmm": 1}, (1, 1))
FURTHER = Asks({"mm": 1}, {"addmm": 2}, (1, 1))
"""Another matrix on the same input, to whose gradient it adds."""
BRANCHES = Asks({"add": 1}, {}, (1, 0))
BOTH_BIASES = Asks({"add": 1}, {"copy_": 1}, (1, 1))
"""Their sum, whose gradient both get."""
GPT2_VECTORS = [VECTOR] * 8
"""Of two norms two each, and the biases of four matrices."""
SEQUENTIAL = [LINEAR, LINEAR, LINEAR, ADDS, ADDS]
AROUND = [BIASED, TOGETHER, *SEQUENTIAL, *GPT2_VECTORS]
"""Operators of a GPT-2 layer that all sets except `unfused` share, without the sum of the qkv bias's gradient."""
GPT2 = [*AROUND, BIAS_SUM, NORM, NORM, GELU]
UNDROPPED = [RESIDUAL, BIAS_SUM] * 2

# The heads of q, k and v one behind the other for the batched products, and those of the result side by side; the
# gradient again by heads.
COPIES = Asks({"clone": 4}, {"clone": 1}, (4, 1))
PRODUCTS = Asks({"bmm": 2}, {"bmm": 4}, (2, 4))
SOFTMAX = Asks({"softmax.forward": 1}, {"softmax.backward": 1}, (1, 1))
SCALE_AND_MASK = Asks({"div": 1, "mul": 2, "rsub": 1, "sub": 1}, {"div": 1, "mul": 1}, (5, 2))
TORCH_SOFTMAX = Asks({"_softmax": 1}, {"_softmax_backward_data": 1}, (1, 1))
ADDED_BIAS = Asks({"add_": 1}, {"sum": 1}, (0, 1))
BARE_GELU = Asks({"gelu": 1}, {"gelu_backward": 1}, (1, 1))
BIAS_AND_RESIDUAL = Asks({"add": 2}, {"sum": 1}, (2, 1))
UNFUSED = [ADDED_BIAS, ADDED_BIAS, BARE_GELU, BIAS_AND_RESIDUAL, BIAS_AND_RESIDUAL]
KEYS = Asks({"clone": 1}, {}, (1, 0))
"""Keys that lie beside the values, to be turned without them."""
BIASED_ATTENTION = Asks({EFFICIENT: 1}, {f"{EFFICIENT}_backward": 1}, (4, 3))


def in_passes(asks: list[Asks]) -> list[Asks]:
    """A weight's gradient by itself, and then added: what software until 2021 did in the place of one product."""
    weights = [each for each in asks if each in (LINEAR, BIASED)]
    added = Asks({}, {"mm": 1, "add_": 1}, (0, 1))
    alone = [each._replace(backward=each.backward | {"addmm": 0}) for each in weights]
    return [*(each for each in asks if each not in weights), *alone, *[added] * len(weights)]


LAYER: dict[str, list[Asks]] = {
    "gpt2-fused": [*GPT2, ATTENTION, *UNDROPPED],
    "gpt2-dropout": [*GPT2, ATTENTION, DROPOUT, DROPOUT],
    "gpt2-reference": [
        *AROUND,
        TORCH_BIAS_SUM,
        ATTENTION,
        TORCH_NORM,
        TORCH_NORM,
        TORCH_GELU,
        TORCH_RESIDUAL,
        TORCH_RESIDUAL,
    ],
    "gpt2-softmax": [*in_passes(GPT2), COPIES, PRODUCTS, SOFTMAX, *UNDROPPED],
    "gpt2-unfused": [
        *in_passes([LINEAR, TOGETHER, *SEQUENTIAL, *GPT2_VECTORS, NORM, NORM]),
        *[COPIES, PRODUCTS, SCALE_AND_MASK, TORCH_SOFTMAX, *UNFUSED],
    ],
    "bloom": [*GPT2, BIASED_ATTENTION, *UNDROPPED],
    "llama": [
        *[RMS, RMS, VECTOR, VECTOR, LINEAR, FURTHER, ROTARY, KEYS, ROTARY, TOGETHER, ATTENTION, SWIGLU],
        *[*SEQUENTIAL, RESIDUAL, RESIDUAL],
    ],
    "neox": [
        *[NORM, NORM, BIASED, BIAS_SUM, ROTARY, TOGETHER, ATTENTION, GELU, *SEQUENTIAL, *GPT2_VECTORS],
        *[BRANCHES, BOTH_BIASES, RESIDUAL, BIAS_SUM],
    ],
    "falcon": [
        *[NORM, VECTOR, VECTOR, LINEAR, FURTHER, FURTHER, ROTARY, ROTARY, TOGETHER, ATTENTION, BARE_GELU],
        *[LINEAR, LINEAR, BRANCHES, RESIDUAL, ADDS],
    ],
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-fused": {},
    "gpt2-dropout": {"dropout": 0.1},
    "gpt2-reference": {"kernels": "reference"},
    "gpt2-softmax": {"kernels": "softmax"},
    "gpt2-unfused": {"kernels": "unfused"},
    "bloom": {"name": "bloom"},
    "llama": {"name": "llama"},
    "neox": {"name": "neox"},
    "falcon": {"name": "falcon"},
}


def of(name: str, layers: int) -> dict[str, Any]:
    """A case of `LAYER`."""
    return case(**{"dropout": 0.0, **CASES[name], "layers": layers})


def of_layer(found: Answers, one: str, two: str) -> tuple[list[Counter[str]], list[int]]:
    """Launches by name, and allocations, of forward and backward of a second micro-batch in a second layer."""
    launches, allocations = [], []
    for k in (-3, -2):
        (phase, fewer, less), (same, more, much) = found[one]["passes"][k], found[two]["passes"][k]
        assert phase == same == ("forward", "backward")[k + 3]
        launches.append(Counter(more) - Counter(fewer))
        allocations.append(sum(much.values()) - sum(less.values()))
    return launches, allocations


def agrees(name: str, found: Answers) -> tuple[int, ...]:
    """Launches of forward and backward, once they are those of `LAYER`."""
    launches, allocations = of_layer(found, *(of(name, layers)["name"] for layers in (1, 2)))
    for k in range(2):
        assert launches[k] == sum((Counter(asks[k]) for asks in LAYER[name]), Counter[str]())
        assert allocations[k] == sum(asks.allocates[k] for asks in LAYER[name])
    return tuple(each.total() for each in launches)


def test_a_layer_of_gpt2_launches_its_operators_and_no_more(quick: Answers) -> None:
    assert agrees("gpt2-fused", quick) == (10, 32)


@pytest.mark.slow
def test_so_does_any_layer_by_any_set_of_operators(runtime: Path) -> None:
    found = audited(runtime, [of(name, layers) for name in CASES for layers in (1, 2)])
    launches = {name: agrees(name, found) for name in CASES}
    assert launches["gpt2-dropout"] == (10, 32)
    assert launches["gpt2-reference"] == (13, 28)


def can_be_captured(answer: dict[str, Any]) -> bool:
    """Whether no operator waits for the device, and a pass is told nothing that its like in the step before was not:
    operators, shapes, memory and numbers are the same, so that a replay of one is the other."""
    return answer["broken"] == [] and answer["told"] == []


@pytest.mark.parametrize("kernels", ["fused", "reference", "unfused"])
def test_forward_and_backward_can_be_captured(quick: Answers, kernels: str) -> None:
    assert can_be_captured(quick[case(kernels=kernels, dropout=0.0)["name"]])


@pytest.mark.slow
def test_so_they_can_of_any_layer_by_any_set(runtime: Path) -> None:
    """Elements to drop are an argument of the launch, which a replay would repeat, unless the key is on the device."""
    cases = [case(kernels=kernels, dropout=0.0) for kernels in SETS]
    cases += [
        case(name, kernels=kernels, dropout=0.0) for name in LAYERS for kernels in ("fused", "reference")
    ][2:]
    cases += [case(layout="recompute", dropout=0.0)]
    for name, answer in audited(runtime, cases).items():
        assert can_be_captured(answer), name
    (dropped,) = audited(runtime, [case()]).values()
    assert dropped["told"] == ["dropout.backward", "dropout.forward"]
    with_keys = [
        {**case(kernels=kernels, layout=layout), "device_keys": True}
        for kernels in ("fused", "softmax", "unfused")
        for layout in ("alone", "recompute")
    ]
    for name, answer in audited(runtime, with_keys).items():
        assert can_be_captured(answer), name
