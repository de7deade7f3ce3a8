"""Tests that steps on fake CUDA tensors satisfy `rules` for all layers, layouts, operator sets and precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import ADAMW, LAYERS, LAYOUTS, QUICK, SETS, Answers, audit, case, needs_compiler
from tests.fake_cuda.faults import FAULTS

pytestmark = [needs_compiler, pytest.mark.xdist_group("fake_cuda")]


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
