"""Tests of `repro simulate`: JSON, text, intervals, steps that do not fit, two layouts, and files of frameworks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from repro import cli
from repro.accuracy.calibrate.document import toml_text
from repro.config import systems
from repro.simulate.time.calibration import PUBLISHED_POINT, UNCALIBRATED
from repro.util import units
from tests.accuracy.twins.conftest import tables
from tests.cli.conftest import FIT, GPT2, Run

pytestmark = pytest.mark.usefixtures("in_process")
TWO_MB = str(systems.load_system_file("dgx2").context() + 2_000_000)
"""Memory limit that leaves 2 MB for tensors."""


def test_json_has_memory_traffic_flops_and_the_precision_of_the_device(run: Run, tiny_model: str) -> None:
    query = ["simulate", "--model", tiny_model, "--gpus", "8", "--json", "--system"]
    options = "--tp 2 --pp 2 --zero 1 --global-batch 16 --recompute"
    code, out = run(*query, "dgx2", *options.split())
    assert code == 0
    found = json.loads(out)
    assert (found["outcome"], found["layout"]["dp"], found["layout"]["precision"]) == ("ok", 2, "fp16")
    assert found["params"] > 0
    assert {"peak_bytes", "reserved_bytes", "by_category", "by_role"} <= set(found["memory"])
    assert {"bytes_by_group", "bytes_by_link"} <= set(found["comm"])
    assert {"model", "hardware"} <= set(found["flops"])
    assert found["trace_seconds"] > 0
    assert set(found["memory"]["by_role"]) == {"first", "last"}
    for system, precision in (("selene", "bf16"), ("local", "fp32")):
        assert json.loads(run(*query, system)[1])["layout"]["precision"] == precision
    options = "--precision bf16 --kernels softmax --recompute-selective"
    layout = json.loads(run(*query, "local", *options.split())[1])["layout"]
    assert (layout["precision"], layout["recompute"]) == ("bf16", "selective")


def test_text_shows_memory_traffic_and_the_failure_cause(run: Run, tiny_model: str) -> None:
    query = ["simulate", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--tp", "2", "--zero", "1"]
    found = json.loads(run(*query, "--json")[1])
    code, out = run(*query)
    assert code == 0
    size, sent = found["memory"]["by_category"]["optimizer"], found["comm"]["bytes_by_group"]["dp"]
    assert out.startswith("Fits: tiny")
    assert re.search(rf"\noptimizer states +{units.gb(size)}", out)
    assert re.search(rf"\ndp +nvlink +2 +{units.gb(sent)}\n", out)
    assert "Memory peak: " not in out
    assert max(map(len, out.splitlines())) <= 100
    for words in ("Memory peak: ", "FLOP per step", "uncertain input", "hidden communication"):
        assert words in run(*query, "--details")[1]
    assert "Little memory is left" not in out
    full = found["memory"]["context_bytes"] + found["memory"]["reserved_bytes"]
    for limit, is_little in ((full / 0.98, True), (full / 0.6, False)):
        out = run(*query, "--memory-limit", str(round(limit)))[1]
        assert ("Little memory is left" in out) == is_little
        assert ("of which NCCL needs " in out) == is_little
    code, out = run(*query, "--memory-limit", TWO_MB)
    assert code == 1
    assert out.startswith("Does not fit: tiny")
    cause = r"Cause: \S+ MB are allocated at the peak in \w+, more than 2 MB of device memory; \S+ MB are missing\."
    assert re.search(cause, " ".join(out.split()))


def test_text_shows_the_interval_or_measured_inputs(run: Run, tiny_model: str, tmp_path: Path) -> None:
    """A calibrated system has no interval, because its measured inputs count as exact."""
    query = ["simulate", "--model", tiny_model, "--gpus", "1", "--zero", "1"]
    _, out = run(*query, "--system", "dgx2")
    assert "90 % interval" in out
    assert "No interval" not in out
    measured = tmp_path / "here.toml"
    measured.write_text(toml_text(tables()))
    code, out = run(*query, "--system", str(measured))
    assert code == 0
    assert "90 % interval" not in out
    assert "No interval, because all inputs are measured" in out


def test_step_that_does_not_fit_has_no_time(run: Run, tiny_model: str, tmp_path: Path) -> None:
    query = ["--model", tiny_model, "--system", "dgx2", "--gpus", "1", "--memory-limit", TWO_MB]
    timeline = tmp_path / "step.json"
    code, out = run("simulate", *query, "--timeline", str(timeline))
    assert "Predicted step time" not in out
    assert "No step time is predicted: the step does not fit the device's memory" in out
    assert not timeline.exists()
    found = [run(name, *query, "--json") for name in ("simulate", "plan")]
    step, rows = (json.loads(printed) for _, printed in found)
    assert step["time"] is None
    assert not any(row["time"] for row in rows)
    fit = run(*FIT, "--memory-limit", TWO_MB)
    assert {code, fit[0], *(exit_code for exit_code, _ in found)} == {1}
    for name in ("simulate", "fit", "plan"):
        assert "Exit code 1" in run(name, "--help")[1]
    assert "Exit codes: 0 success" in run("--help")[1]


@pytest.mark.parametrize(
    ("system", "kernels", "basis"),
    [
        ("dgx-h100", "unfused", UNCALIBRATED),
        ("dgx2", "softmax", PUBLISHED_POINT),
        ("dgx-h100", "fused", PUBLISHED_POINT),
    ],
)
def test_prediction_names_the_basis_of_its_times(
    run: Run, tiny_model: str, system: str, kernels: str, basis: str
) -> None:
    query = ["--model", tiny_model, "--system", system, "--gpus", "4", "--kernels", kernels]
    few = [*query, "--zero", "1", "--tp", "2", "--pp", "1", "--no-sp", "--no-recompute", "--tokens", "1e9"]
    step = json.loads(run("simulate", *query, "--json")[1])["time"]
    rows = json.loads(run("plan", *few, "--json")[1])
    assert {row["time"]["rests_on"] for row in rows} == {step["rests_on"]} == {basis}
    assert 0 < step["mfu"] < 1
    peak = systems.load_system_file(system).peak("fp16" if system == "dgx2" else "bf16")
    assert step["mfu"] == pytest.approx(step["flops_per_device"] / peak)  # no recomputation
    page, table = run("simulate", *query)[1], run("plan", *few)[1]
    for text in (page, table):
        assert "MFU" in text
        assert re.search(f"Basis of the times?: {basis}; ", text)
    assert step["interval"]["low_s"] < step["step_s"] < step["interval"]["high_s"]
    assert max(map(len, table.splitlines())) <= 100


def test_more_gpus_than_the_system_has_print_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["simulate", *GPT2, "--gpus", "400", "--json"])
    assert not capsys.readouterr().err
    cli.main(["simulate", *GPT2, "--gpus", "800", "--json"])
    assert capsys.readouterr().err.startswith("note: dgx2 has 400 GPUs (25 nodes of 16)")


STEP = ("--model", "gpt2-1.5b", "--system", "dgx2", "--gpus", "16", "--micro-batch", "2", "--recompute")


def test_versus_has_the_results_of_two_simulations(run: Run) -> None:
    separate = [
        json.loads(run("simulate", *STEP, *options, "--json")[1])
        for options in (("--zero", "1"), ("--zero", "1", "--pp", "4", "--global-batch", "32"))
    ]
    code, out = run("simulate", *STEP, "--zero", "1", "--versus", "--pp 4", "--json")
    both = json.loads(out)
    assert code == 0
    for name, document in zip("AB", separate, strict=True):
        both[name].pop("trace_seconds")
        assert both[name].items() <= document.items()
    code, out = run("simulate", *STEP, "--zero", "1", "--versus", "--pp 4")
    row = next(line for line in out.splitlines() if line.startswith("step time (s)")).split()
    steps = [document["time"]["step_s"] for document in separate]
    ratio = separate[1]["time"]["samples_per_s"] / separate[0]["time"]["samples_per_s"]
    assert row[-3:-1] == [f"{step:,.2f}" for step in steps]
    assert f"B trains {units.number(ratio)} times as many samples/s as A (90 % interval: " in out
    assert len(out.splitlines()) <= 24


def test_versus_layout_that_does_not_fit_has_no_ratio(run: Run) -> None:
    code, out = run("simulate", *STEP, "--versus", "--model turing-nlg-17b")
    assert code == 1
    assert "B does not fit: " in out
    assert "samples/s" not in out
    assert "parameters" in out


def test_written_launch_file_has_the_prediction_of_its_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = ["--system", "dgx-h100", "--gpus", "8"]
    options = ["--tp", "2", "--zero", "1", "--grad-dtype", "fp32", "--global-batch", "16"]
    written = ["--launch", "megatron", "--output", str(tmp_path)]
    assert cli.main(["simulate", "--model", "llama3-8b", *gpus, *options, *written]) == 0
    planned, note = capsys.readouterr()
    assert "with options for every key of the layout" in note
    assert cli.main(["simulate", "--from", str(tmp_path / "megatron.sh"), *gpus]) == 0
    read, note = capsys.readouterr()
    assert note == ""
    starts = ("Predicted step time", "gradients", "Layout")
    planned, read = ([x for x in text.splitlines() if x.startswith(starts)] for text in (planned, read))
    assert read == planned != []
