"""Tests of steps on fake CUDA tensors: requirements of CUDA operators, launches, allocations and captured passes.

The audit (`tests.fake_cuda.audit`) runs all layers, layouts, operator sets and precisions.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fake_cuda.cases import (
    ADAMW,
    LAYERS,
    LAYOUTS,
    QUICK,
    SETS,
    Answers,
    audit,
    case,
    compile_runtime,
    needs_compiler,
)

pytestmark = [needs_compiler, pytest.mark.xdist_group("fake_cuda")]

FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer norm weights are fp32": (
        "import repro.kernels.layernorm as m; m._weight_dtype = lambda x: torch.float32",
        case(kernels="reference"),
        "native_layer_norm on bfloat16 and float32",
    ),
    "a linear weight has another dtype": (
        "import repro.parallel.tensor as m; r = m.row_products\n"
        "m.row_products = lambda x, weight: r(x, weight.float())",
        case(),
        "mm on bfloat16 and float32",
    ),
    "tokens stay on the host": (
        "import repro.parallel.tensor as m; e = m.embed; m.embed = lambda t, w, tp: e(t.cpu(), w, tp)",
        case(),
        "embedding on tensors of cpu and cuda",
    ),
    "tokens come from pageable memory": (
        "from torch._subclasses.fake_tensor import FakeTensor; FakeTensor.pin_memory = lambda self: self",
        case(),
        "copy_ between the device and pageable memory",
    ),
    "an argument of the norm changes in every pass": (
        "import itertools, repro.model.layer as m; c = itertools.count(); f = m.normalised\n"
        "m.normalised = lambda x, *a: f(x + next(c), *a)",
        case(dropout=0.0),
        "aten.add",
    ),
    "the host reads the loss": (
        "import repro.model.gpt as m; f = m.GPT.forward\n"
        "def forward(self, *a):\n    y = f(self, *a); y.item(); return y\nm.GPT.forward = forward",
        case(),
        "_local_scalar_dense waits for the device",
    ),
    "checkpoints are in pageable host memory": (
        "import repro.parallel.storage as m\n"
        "m.empty_on_host = lambda n, like, c: m.mark(torch.empty(n, dtype=like.dtype), c)",
        case("gpt2", "pa-cpu"),
        "copy_ between the device and pageable memory",
    ),
    "a collective's tensor is not contiguous": (
        "import repro.parallel.comm as m; r = m.Group.all_reduce\n"
        "m.Group.all_reduce = lambda self, t, op, purpose: r(self, t.expand(2, *t.shape), op, purpose)",
        case("gpt2", "pa-cpu"),
        "collective on a cuda tensor, contiguous: False",
    ),
}
"""Python code that injects a fault, the audited case, and the text that the audit must report."""
FAULTY = [{**audited, "name": fault, "fault": code} for fault, (code, audited, _) in FAULTS.items()]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the replacement for CUDA's runtime."""
    return compile_runtime(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="module")
def quick(runtime: Path) -> Answers:
    """Return the audit's answers for the cases of the tests that are not slow."""
    return audit(runtime, [*QUICK, *FAULTY, ADAMW])


def check_no_violations(found: Answers, cases: list[dict[str, Any]]) -> None:
    violations = {name: answer["violations"] for name, answer in found.items()}
    assert violations == {each["name"]: [] for each in cases}
    for each in cases:
        expected = ["cuda"] if each["kernels"] else ["torch: no NVRTC"]
        is_reference = each["layout"]["kernels"] == "reference"
        assert found[each["name"]]["ran"] == ([] if is_reference else expected)


def test_steps_satisfy_the_requirements_of_cuda_operators(quick: Answers) -> None:
    check_no_violations({each["name"]: quick[each["name"]] for each in QUICK}, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("nvrtc", [True, False])
def test_all_layers_and_operator_sets_satisfy_cuda_requirements(runtime: Path, nvrtc: bool) -> None:
    """GPT-2 has all pairs of an operator set and a precision; other layers have `fused` and `reference`."""
    cases = [
        case("gpt2", precision=precision, kernels=kernels, nvrtc=nvrtc)
        for precision in ("fp32", "fp16", "bf16")
        for kernels in SETS
    ]
    for index, name in enumerate(each for each in LAYERS if each != "gpt2"):
        one, other = ("fp16", "bf16")[:: 1 if index % 2 else -1]
        cases += [case(name, precision=one, nvrtc=nvrtc)]
        cases += [case(name, precision=other, kernels="reference", nvrtc=nvrtc)]
    check_no_violations(audit(runtime, cases), cases)


@pytest.mark.slow
def test_all_layouts_satisfy_cuda_requirements(runtime: Path) -> None:
    """Each layout runs GPT-2 in one 16-bit precision and LLaMA in the other."""
    cases = []
    for index, layout in enumerate(LAYOUTS):
        one, other = ("fp16", "bf16")[:: 1 if index % 2 else -1]
        cases += [case("gpt2", layout, one), case("llama", layout, other)]
    check_no_violations(audit(runtime, cases), cases)


def test_injected_faults_are_detected(quick: Answers) -> None:
    for fault, (_, _, expected) in FAULTS.items():
        answer = quick[fault]
        assert any(expected in each for each in (*answer["violations"], *answer["changed"])), (fault, answer)


def test_torch_adamw_updates_chunks_of_many_tensors(quick: Answers) -> None:
    """A baseline with one call per tensor would make the fused AdamW kernel look faster than it is."""
    answer = quick[ADAMW["name"]]
    assert answer["violations"] == []
    # Two steps: 2 x 12 h^2 + (V + s) h = 28,160 elements with weight decay in 4 chunks, and the vectors in one.
    assert answer["updates"] == 2 * (4 + 1)


# The expected launches and allocations below are sums over the operators of a layer, in bf16 on one rank, in a second
# micro-batch. `addmm` adds the gradient of a matrix to its part of the bucket; `add_` adds the gradient of a vector.


class Op(NamedTuple):
    """Launches of one operator in forward and in backward, by kernel or torch operator."""

    forward: dict[str, int]
    backward: dict[str, int]
    allocations: tuple[int, int]
    """Numbers of allocations in forward and in backward."""


SUMS = "column_sums.column_sums"
FLASH, EFFICIENT = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient"))
LINEAR = Op({"mm": 1}, {"mm": 1, "addmm": 1}, (1, 1))
"""A product; its backward computes the gradients of the input (`mm`) and the weight (`addmm`)."""
GRAD_SUM = Op({}, {"add": 1}, (0, 1))
"""Sum of the gradients of two uses of one tensor."""
VECTOR = Op({}, {"add_": 1}, (0, 0))
# Backward allocates the sums of the thread blocks and the gradient.
BIAS_SUM = Op({}, {"column_sums.partial_sums": 1, SUMS: 1}, (0, 2))
TORCH_BIAS_SUM = Op({}, {"sum": 1}, (0, 1))
# Forward allocates the result, its log-sum-exp, and torch's dropout seed and offset; backward allocates dq, dk, dv.
ATTENTION = Op({FLASH: 1}, {f"{FLASH}_backward": 1}, (4, 3))
STACK = Op({}, {"stack": 1}, (0, 1))
"""The gradients of q, k and v, or of k and v, are stacked in one tensor."""
# Forward allocates y, mean, rstd; backward allocates dx, the sums of thread blocks, and both vectors' gradients.
NORM = Op({"layernorm.forward": 1}, {"layernorm.backward": 1, SUMS: 1}, (3, 3))
RMS = NORM._replace(allocations=(2, 3))
# Forward allocates y; backward allocates dx, the sums of the thread blocks, and the bias gradient.
GELU = Op({"gelu.forward": 1}, {"gelu.backward": 1, SUMS: 1}, (1, 3))
SWIGLU = Op({"glu.forward": 1}, {"glu.backward": 1}, (1, 1))
ROTARY = Op({"rope.rotary": 1}, {"rope.rotary": 1}, (1, 1))
RESIDUAL = Op({"dropout.forward": 1}, {}, (1, 0))
"""Without dropout, backward returns the gradient unchanged."""
DROPOUT = Op({"dropout.forward": 1}, {"dropout.backward": 1, SUMS: 1}, (1, 3))

TORCH_NORM = Op({"native_layer_norm": 1}, {"native_layer_norm_backward": 1}, (3, 3))
TORCH_GELU = Op({"add": 1, "gelu_": 1}, {"add": 1, "gelu_backward": 1, "sum": 1}, (1, 2))
TORCH_RESIDUAL = Op({"add": 1, "add_": 1}, {"sum": 1}, (1, 1))

BIASED = Op({"addmm": 1}, {"mm": 1, "addmm": 1}, (1, 1))
SECOND = Op({"mm": 1}, {"addmm": 2}, (1, 1))
"""A second product of the same input; `addmm` also adds to the gradient of the input."""
BRANCH_SUM = Op({"add": 1}, {}, (1, 0))
BOTH_BIASES = Op({"add": 1}, {"copy_": 1}, (1, 1))
"""Sum of the biases of both branches; each bias gets the gradient of the sum."""
GPT2_VECTORS = [VECTOR] * 8
"""Two vectors of each of two norms, and the biases of four matrices."""
SEQUENTIAL = [LINEAR, LINEAR, LINEAR, GRAD_SUM, GRAD_SUM]
SHARED = [BIASED, STACK, *SEQUENTIAL, *GPT2_VECTORS]
"""Operators of a GPT-2 layer in all sets except `unfused`, without the sum for the gradient of the qkv bias."""
GPT2 = [*SHARED, BIAS_SUM, NORM, NORM, GELU]
RESIDUALS = [RESIDUAL, BIAS_SUM] * 2

# Forward copies q, k and v to a layout by heads for the batched products, and the result to a layout by tokens.
# Backward copies the gradient to a layout by heads.
COPIES = Op({"clone": 4}, {"clone": 1}, (4, 1))
PRODUCTS = Op({"bmm": 2}, {"bmm": 4}, (2, 4))
SOFTMAX = Op({"softmax.forward": 1}, {"softmax.backward": 1}, (1, 1))
SCALE_AND_MASK = Op({"div": 1, "mul": 2, "rsub": 1, "sub": 1}, {"div": 1, "mul": 1}, (5, 2))
TORCH_SOFTMAX = Op({"_softmax": 1}, {"_softmax_backward_data": 1}, (1, 1))
ADDED_BIAS = Op({"add_": 1}, {"sum": 1}, (0, 1))
BARE_GELU = Op({"gelu": 1}, {"gelu_backward": 1}, (1, 1))
BIAS_AND_RESIDUAL = Op({"add": 2}, {"sum": 1}, (2, 1))
UNFUSED = [ADDED_BIAS, ADDED_BIAS, BARE_GELU, BIAS_AND_RESIDUAL, BIAS_AND_RESIDUAL]
KEY_COPY = Op({"clone": 1}, {}, (1, 0))
"""Copy of the keys for the rotary embedding, because the keys share a tensor with the values."""
BIASED_ATTENTION = Op({EFFICIENT: 1}, {f"{EFFICIENT}_backward": 1}, (4, 3))


def unaccumulated(operators: list[Op]) -> list[Op]:
    """Replace `addmm` by `mm` and `add_` for the weight gradients, as in software until 2021."""
    weights = [each for each in operators if each in (LINEAR, BIASED)]
    added = Op({}, {"mm": 1, "add_": 1}, (0, 1))
    alone = [each._replace(backward=each.backward | {"addmm": 0}) for each in weights]
    return [*(each for each in operators if each not in weights), *alone, *[added] * len(weights)]


LAYER: dict[str, list[Op]] = {
    "gpt2-fused": [*GPT2, ATTENTION, *RESIDUALS],
    "gpt2-dropout": [*GPT2, ATTENTION, DROPOUT, DROPOUT],
    "gpt2-reference": [
        *[*SHARED, TORCH_BIAS_SUM, ATTENTION, TORCH_NORM, TORCH_NORM, TORCH_GELU],
        *[TORCH_RESIDUAL, TORCH_RESIDUAL],
    ],
    "gpt2-softmax": [*unaccumulated(GPT2), COPIES, PRODUCTS, SOFTMAX, *RESIDUALS],
    "gpt2-unfused": [
        *unaccumulated([LINEAR, STACK, *SEQUENTIAL, *GPT2_VECTORS, NORM, NORM]),
        *[COPIES, PRODUCTS, SCALE_AND_MASK, TORCH_SOFTMAX, *UNFUSED],
    ],
    "bloom": [*GPT2, BIASED_ATTENTION, *RESIDUALS],
    "llama": [
        *[RMS, RMS, VECTOR, VECTOR, LINEAR, SECOND, ROTARY, KEY_COPY, ROTARY, STACK, ATTENTION, SWIGLU],
        *[*SEQUENTIAL, RESIDUAL, RESIDUAL],
    ],
    "neox": [
        *[NORM, NORM, BIASED, BIAS_SUM, ROTARY, STACK, ATTENTION, GELU, *SEQUENTIAL, *GPT2_VECTORS],
        *[BRANCH_SUM, BOTH_BIASES, RESIDUAL, BIAS_SUM],
    ],
    "falcon": [
        *[NORM, VECTOR, VECTOR, LINEAR, SECOND, SECOND, ROTARY, ROTARY, STACK, ATTENTION, BARE_GELU],
        *[LINEAR, LINEAR, BRANCH_SUM, RESIDUAL, GRAD_SUM],
    ],
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-fused": {},
    "gpt2-dropout": {"dropout": 0.1},
    **{f"gpt2-{kernels}": {"kernels": kernels} for kernels in ("reference", "softmax", "unfused")},
    **{name: {"name": name} for name in ("bloom", "llama", "neox", "falcon")},
}


def audit_case(name: str, layers: int) -> dict[str, Any]:
    """Return the case of the audit for an entry of `LAYER`."""
    return case(**{"dropout": 0.0, **CASES[name], "layers": layers})


def check_layer(name: str, found: Answers) -> tuple[int, ...]:
    """Check the second layer in the second micro-batch, and return its launches in forward and in backward."""
    one, two = (found[audit_case(name, layers)["name"]]["passes"] for layers in (1, 2))
    totals = []
    for k, phase in enumerate(("forward", "backward")):
        (same, fewer, less), (other, more, much) = one[k - 3], two[k - 3]
        assert same == other == phase
        launches = Counter(more) - Counter(fewer)
        assert launches == sum((Counter(operator[k]) for operator in LAYER[name]), Counter[str]())
        allocations = sum(much.values()) - sum(less.values())
        assert allocations == sum(operator.allocations[k] for operator in LAYER[name])
        totals.append(launches.total())
    return tuple(totals)


def test_a_gpt2_layer_launches_only_its_operators(quick: Answers) -> None:
    assert check_layer("gpt2-fused", quick) == (10, 32)


@pytest.mark.slow
def test_every_layer_and_operator_set_launches_only_its_operators(runtime: Path) -> None:
    found = audit(runtime, [audit_case(name, layers) for name in CASES for layers in (1, 2)])
    launches = {name: check_layer(name, found) for name in CASES}
    assert launches["gpt2-dropout"] == (10, 32)
    assert launches["gpt2-reference"] == (13, 28)


def is_capturable(answer: dict[str, Any]) -> bool:
    """Return whether a CUDA graph can capture the passes: no operator waits for the device, and the operators, shapes
    and numbers equal those of the preceding step."""
    return answer["violations"] == [] and answer["changed"] == []


@pytest.mark.parametrize("kernels", ["fused", "reference", "unfused"])
def test_forward_and_backward_of_gpt2_are_capturable(quick: Answers, kernels: str) -> None:
    assert is_capturable(quick[case(kernels=kernels, dropout=0.0)["name"]])


@pytest.mark.slow
def test_every_layer_and_operator_set_is_capturable(runtime: Path) -> None:
    """A replay would repeat the launch argument that selects the dropped elements, unless the key is on the device."""
    cases = [case(kernels=kernels, dropout=0.0) for kernels in SETS]
    cases += [
        case(name, kernels=kernels, dropout=0.0) for name in LAYERS for kernels in ("fused", "reference")
    ][2:]
    cases += [case(layout="recompute", dropout=0.0)]
    for name, answer in audit(runtime, cases).items():
        assert is_capturable(answer), name
    (with_dropout,) = audit(runtime, [case()]).values()
    assert with_dropout["changed"] == ["dropout.backward", "dropout.forward"]
    with_keys = [
        {**case(kernels=kernels, layout=layout), "device_keys": True}
        for kernels in ("fused", "softmax", "unfused")
        for layout in ("alone", "recompute")
    ]
    for name, answer in audit(runtime, with_keys).items():
        assert is_capturable(answer), name
