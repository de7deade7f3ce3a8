"""Tests of `repro fit`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Layout, models
from repro.config.engines import unfused_attention_note
from repro.config.systems import load_system_file
from repro.report.text.fit_and_plan import print_fits
from repro.util import units
from tests.cli.conftest import FIT, Run

pytestmark = pytest.mark.usefixtures("in_process")


def test_fit_compares_the_zero_stages(run: Run) -> None:
    """Without --zero, the table has one row per stage, equal to the result with --zero of this stage."""
    command = [*FIT, "--memory-limit", "1.4GB"]
    code, out = run(*command)
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if re.match(r" +\d ", line)}
    assert list(rows) == ["0", "1", "2", "3"]
    parameters = {}
    for stage, row in rows.items():
        found = json.loads(run(*command, "--zero", stage, "--json")[1])
        largest = found["largest"]
        assert row[1:3] == [units.parameter_count(largest["params"]), str(largest["layers"])]
        assert found["first_failing"]["layers"] == largest["layers"] + 1
        assert found["traces"] == len(found["trials"])
        parameters[stage] = largest["params"]
    assert f"parameters with ZeRO {max(parameters, key=parameters.__getitem__)}." in out
    code, out = run(*command, "--zero", stage, "--details")
    assert code == 0
    for words in (f"{row[1]} parameters.", found["binding"], "Failure: ", "traces"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_context_parallel_ranks_fit_more_layers(run: Run) -> None:
    """Two ranks that split the tokens of a sample fit more layers than two ranks with one sample each."""
    command = [*FIT[:-1], "2048", "--memory-limit", "1.5GB", "--json"]
    found = [json.loads(run(*command, "--cp", str(cp))[1]) for cp in (1, 2)]
    assert [(fit["layout"]["cp"], fit["layout"]["dp"]) for fit in found] == [(1, 2), (2, 1)]
    data_parallel, context_parallel = (fit["largest"]["layers"] for fit in found)
    assert data_parallel < context_parallel <= 2 * data_parallel + 1


def test_fit_names_the_zero_stages_of_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    document = dict.fromkeys(("largest", "first_failing", "binding"))
    document |= {"sizes": {"vocab": 1, "seq": 1, "hidden": 1}, "search": "layers", "gpus": 4}
    document |= {"limit_bytes": 1, "communicator_bytes": 0}
    model, system = models.load_model("gpt2-1.5b"), load_system_file("dgx2")
    layouts = (Layout(dp=4, zero=stage) for stage in (0, 1, 3))  # the stages of DeepSpeed in 2021
    fits: Any = [(SimpleNamespace(model=model, layout=one, system=system), document) for one in layouts]
    print_fits(fits, "")
    assert "ZeRO 0, 1 and 3" in capsys.readouterr().out


def test_fit_notes_attention_heads_without_a_fused_kernel(run: Run) -> None:
    for heads, keys, capability, has_note in (
        (16, {}, "7.0", True),  # head width 100
        (25, {}, "7.0", False),  # head width 64, as in `suites/one_gpu.toml`
        (16, {}, "8.0", False),
        (16, {}, "", False),
        (16, {"precision": "fp32"}, "7.0", False),
        (16, {"kernels": "unfused"}, "7.0", False),
    ):
        model = replace(models.load_model("gpt2-1.5b"), heads=heads)
        layout = Layout(**{"precision": "fp16", **keys})
        assert bool(unfused_attention_note(model, layout, capability)) is has_note
    options = "--system dgx2 --gpus 1 --hidden 1600 --heads 16 --precision fp16 --micro-batch 1 --recompute"
    code, out = run("fit", *options.split())
    assert code == 0
    assert "Attention heads of width 100 are not a multiple of 8" in " ".join(out.split())
