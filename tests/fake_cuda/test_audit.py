"""The step asks nothing of CUDA's operators that they refuse: precisions, operator sets, fallbacks and layers.

No GPU runs it: tensors are fake ones of the device "cuda" (see `audit`), and the rules are those of `rules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import LAYERS, LAYOUTS, PIECES, QUICK, SETS, Answers, audited, case, needs_compiler
from tests.fake_cuda.faults import FAULTS

pytestmark = [needs_compiler, pytest.mark.xdist_group("fake_cuda")]


def nothing_is_broken(found: Answers, cases: list[dict[str, Any]]) -> None:
    assert {name: answer["broken"] for name, answer in found.items()} == {each["name"]: [] for each in cases}
    for each in cases:
        expected = ["cuda"] if each["kernels"] else ["torch: no NVRTC"]
        plain = each["layout"]["kernels"] == "reference"
        assert found[each["name"]]["ran"] == ([] if plain else expected)


def test_nothing_is_asked_that_cuda_refuses(quick: Answers) -> None:
    nothing_is_broken({each["name"]: quick[each["name"]] for each in QUICK}, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("nvrtc", [True, False])
def test_nor_by_any_layer_or_set_of_operators(runtime: Path, nvrtc: bool) -> None:
    """Every pair of a set and a precision for GPT-2; every other layer in both precisions, by both kinds of sets."""
    cases = [
        case("gpt2", precision=precision, kernels=kernels, nvrtc=nvrtc)
        for precision in ("fp32", "fp16", "bf16")
        for kernels in SETS
    ]
    for index, name in enumerate(each for each in LAYERS if each != "gpt2"):
        one, other = ("fp16", "bf16")[:: 1 if index % 2 else -1]
        cases += [case(name, precision=one, nvrtc=nvrtc)]
        cases += [case(name, precision=other, kernels="reference", nvrtc=nvrtc)]
    nothing_is_broken(audited(runtime, cases), cases)


@pytest.mark.slow
def test_nor_by_any_layout(runtime: Path) -> None:
    """Every layout with two layers and in two precisions, in turns."""
    cases = []
    for index, layout in enumerate(LAYOUTS):
        one, other = ("fp16", "bf16")[:: 1 if index % 2 else -1]
        cases += [case("gpt2", layout, one), case("llama", layout, other)]
    nothing_is_broken(audited(runtime, cases), cases)


def test_faults_are_found(quick: Answers) -> None:
    for fault, (_, _, seen) in FAULTS.items():
        answer = quick[fault]
        assert any(seen in each for each in (*answer["broken"], *answer["told"])), (fault, answer)


def test_torchs_adamw_has_few_calls(quick: Answers) -> None:
    """A baseline of a call for every 2**20 elements, or for every tensor, would flatter our kernel."""
    answer = quick[PIECES["name"]]
    assert answer["broken"] == []
    # In two steps 2 x 12 h^2 + (V + s) h = 28,160 elements with weight decay, in 4 pieces; the vectors without in one.
    assert answer["updates"] == 2 * (4 + 1)
