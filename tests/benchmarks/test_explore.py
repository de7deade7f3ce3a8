"""Benchmark of updates of the interactive notebook `reports/09_explore.py`: CPU seconds for its text and its figure.

    make benchmarks

Target: the text within 0.5 s for models from 1.5B to 175B.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from repro.report.page import build

LAYOUTS: dict[str, dict[str, Any]] = {
    "1.5B on 64": {"model": "gpt2-1.5b", "tp": 1, "pp": 1, "micro_batch": 8, "micro_batches": 1},
    "17B on 64": {"model": "turing-nlg-17b", "tp": 4, "pp": 1, "zero": 2, "micro_batches": 1},
    "70B on 64, 4 stages": {},
    "175B on 1024, 8 stages": {"model": "megatron-175b", "system": "selene", "gpus": 1024, "pp": 8},
}
"""Layout keys that differ from the notebook's initial state."""
TEXT_LIMIT_S = 0.5


@pytest.fixture(scope="module")
def scope() -> dict[str, Any]:
    """Return the functions of the notebook; its last cell, which creates the controls, does not run."""
    found: dict[str, Any] = {"__name__": "__main__"}
    source = build.read_notebook(build.NOTEBOOKS_FOLDER / "09_explore.py")
    for cell in source.cells[:-1]:
        if cell.cell_type == "code":
            exec(compile(cell.source, "09_explore.py", "exec"), found)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("output", ["text", "figure"])
@pytest.mark.benchmark(timer=time.process_time)
def test_update_of_text_and_figure(benchmark: Any, scope: dict[str, Any], name: str, output: str) -> None:
    benchmark.group = f"explore layouts, {output}"
    layout = {**scope["FIRST"], **LAYOUTS[name]}
    if output == "figure":
        found = scope["simulate_layout"](**layout)
        benchmark.pedantic(scope["draw"], args=(found,), rounds=5, warmup_rounds=1)
    else:
        benchmark.pedantic(
            lambda: scope["describe"](scope["simulate_layout"](**layout)), rounds=5, warmup_rounds=1
        )
        assert benchmark.stats.stats.min < TEXT_LIMIT_S
