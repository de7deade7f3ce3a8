"""`repro simulate`, `fit` and `plan` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from repro import cli, systems
from repro.cli.commands.layout_options import LAYOUT
from repro.config import ConfigError, Layout
from repro.simulate.plan.asked import memory_bytes
from repro.simulate.time.basis import BOUND, PUBLISHED
from tests.config.system_texts import NODES, PROVENANCE

CALIBRATED = (
    NODES
    + PROVENANCE
    + """
[device]
name = "here"
memory_bytes = { value = 8e9, source = "here" }
memory_bandwidth = { value = 1e10, source = "here" }
[device.peak_flops]
fp32 = { value = 1e11, source = "here" }
[device.operators.matmul]
fixed_s = 2e-6
per_flop_s = 1e-11
[device.operators.elementwise]
fixed_s = 2e-6
per_byte_s = 1e-10
[links.memory]
per = "device"
bandwidth = { value = 1e9, source = "here" }
"""
)
FIT = [
    "fit",
    "--system",
    "dgx2",
    "--gpus",
    "2",
    "--hidden",
    "128",
    "--heads",
    "4",
    "--vocab",
    "512",
    "--seq",
    "64",
]
GPT2 = ["--model", "gpt2-1.5b", "--system", "dgx2"]


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.host import workers

    monkeypatch.setattr(workers, "usable_cores", lambda: 1)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(list(arguments))
    return code, capsys.readouterr().out


def test_simulate_json(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    code, out = run(
        capsys,
        "simulate",
        "--model",
        tiny_model,
        "--system",
        "dgx2",
        "--gpus",
        "8",
        "--tp",
        "2",
        "--pp",
        "2",
        "--zero",
        "1",
        "--global-batch",
        "16",
        "--recompute",
        "--json",
    )
    assert code == 0
    found = json.loads(out)
    assert found["outcome"] == "ok"
    assert found["layout"]["dp"] == 2
    assert found["layout"]["precision"] == "fp16"  # a V100
    assert found["params"] > 0
    assert {"peak_bytes", "reserved_bytes", "by_category", "by_role"} <= set(found["memory"])
    assert {"bytes_by_group", "bytes_by_link"} <= set(found["comm"])
    assert {"model", "hardware"} <= set(found["flops"])
    assert found["trace_seconds"] > 0
    assert set(found["memory"]["by_role"]) == {"first", "last"}


def test_simulate_says_what_a_person_wants_to_know(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    asked = ["simulate", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--tp", "2", "--zero", "1"]
    code, out = run(capsys, *asked)
    assert code == 0
    for words in (": fits", "parameters", "optimizer states", "The peak is in", "By link: nvlink", "FLOP"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    code, out = run(capsys, *asked, "--memory-limit", str(systems.load("dgx2").context() + 2_000_000))
    assert code == 1
    assert "does not fit" in out
    assert "out of memory" in out


def test_a_step_says_how_sure_it_is(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    """By an interval, or that what was measured is taken as exact."""
    asked = ["simulate", "--model", tiny_model, "--gpus", "1", "--zero", "1"]
    _, out = run(capsys, *asked, "--system", "dgx2")
    assert "90 % interval" in out
    assert "No interval" not in out
    measured = tmp_path / "here.toml"
    measured.write_text(CALIBRATED)
    code, out = run(capsys, *asked, "--system", str(measured))
    assert code == 0
    assert "90 % interval" not in out
    assert "No interval: what was measured is taken as exact" in out


def test_what_does_not_fit_takes_no_time_and_ends_alike(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    least = str(systems.load("dgx2").context() + 2_000_000)
    asked = ["--model", tiny_model, "--system", "dgx2", "--gpus", "1", "--memory-limit", least]
    timeline = tmp_path / "step.json"
    code, out = run(capsys, "simulate", *asked, "--timeline", str(timeline))
    assert "A step takes" not in out
    assert "No time is predicted: the step does not fit" in out
    assert not timeline.exists()
    found = [run(capsys, command, *asked, "--json") for command in ("simulate", "plan")]
    step, rows = (json.loads(said) for _, said in found)
    assert step["time"] is None
    assert not any(row["time"] for row in rows)
    fit = run(capsys, *FIT, "--memory-limit", least)
    assert {code, fit[0], *(ended for ended, _ in found)} == {1}
    for command in ("simulate", "fit", "plan"):
        assert "Exit code 1" in run(capsys, command, "--help")[1]
    assert "Exit codes: 0 done" in run(capsys, "--help")[1]


def test_device_decides_the_precision(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    for system, precision in (("dgx2", "fp16"), ("selene", "bf16"), ("local", "fp32")):
        asked = ["simulate", "--model", tiny_model, "--system", system, "--gpus", "1", "--json"]
        assert json.loads(run(capsys, *asked)[1])["layout"]["precision"] == precision
    found = json.loads(run(capsys, *asked, "--precision", "bf16")[1])
    assert found["layout"]["precision"] == "bf16"


@pytest.mark.slow
def test_fit_json_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*FIT, "--zero", "1", "--memory-limit", "1.76GB"]
    code, out = run(capsys, *asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["largest"]["params"] > 0
    assert found["first_failing"]["layers"] == found["largest"]["layers"] + 1
    assert found["binding"]
    assert found["traces"] == len(found["trials"])
    code, out = run(capsys, *asked)
    assert code == 0
    for words in ("fits", "does not", "What is too much", found["binding"], "traces"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_plan_json_and_page(
    capsys: pytest.CaptureFixture[str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["plan", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--global-batch", "8"]
    asked += ["--micro-batch", "1", "--memory-limit", "1.764GB", "--zero", "1", "--no-sp", "--no-recompute"]
    code, out = run(capsys, *asked, "--pp", "1", "--json")
    assert code == 0
    found = json.loads(out)
    keys = {"outcome", "params", "memory", "comm", "flops", "trace_seconds", "layout", "ruled_out_by"}
    assert all(keys <= set(row) for row in found)
    assert found[0]["outcome"] == "ok"
    assert found[0]["evidence"] == "full"
    assert {row["layout"]["zero"] for row in found} == {1}
    two = json.loads(run(capsys, *asked, "--dp", "2", "--top", "1", "--json")[1])
    assert [row["layout"]["dp"] for row in two] == [2]
    said = run(capsys, *asked, "--top", "1")[1].split("\n\n")[1].splitlines()
    assert sum(" x " in line for line in said) == 2  # the heading and one layout
    assert {"step_s", "samples_per_s", "flops_per_device", "exposed_s", "bubble_s"} <= set(found[0]["time"])
    code, out = run(capsys, *asked, "--tp", "2", "--tokens", "1e9", "--price-per-gpu-hour", "2.5")
    assert code == 0
    shown = ("layouts fit", "TFLOP/s", "MFU", "predicted", "tp x pp x dp")
    for words in (*shown, "trained", "in days", "millions"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    code, out = run(capsys, *asked, "--tp", "2", "--pp", "1")
    assert code == 0
    assert "samples" in out
    assert "90 %" in out
    assert "bubble" not in out, "there is no room for both"
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "100")
    code, out = run(capsys, *asked, "--tp", "2", "--pp", "1")
    assert code == 0
    assert "90 %" in out
    assert "bubble" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_plan_in_which_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", *GPT2, "--gpus", "4", "--memory-limit", "4GB"]
    code, out = run(capsys, *asked)
    assert code == 1
    assert "No layout fits" in out
    assert "optimizer states" in out
    code, out = run(capsys, *asked, "--json")
    assert code == 1
    assert all(row["outcome"] == "oom" and row["ruled_out_by"] for row in json.loads(out))


@pytest.mark.parametrize(
    ("system", "kernels", "basis"),
    [("dgx-h100", "unfused", BOUND), ("dgx2", "softmax", PUBLISHED), ("dgx-h100", "fused", PUBLISHED)],
)
def test_a_prediction_says_what_it_rests_on(
    capsys: pytest.CaptureFixture[str], tiny_model: str, system: str, kernels: str, basis: str
) -> None:
    asked = ["--model", tiny_model, "--system", system, "--gpus", "4", "--kernels", kernels]
    few = [*asked, "--zero", "1", "--tp", "2", "--pp", "1", "--no-sp", "--no-recompute", "--tokens", "1e9"]
    step = json.loads(run(capsys, "simulate", *asked, "--json")[1])["time"]
    rows = json.loads(run(capsys, "plan", *few, "--json")[1])
    assert {row["time"]["rests_on"] for row in rows} == {step["rests_on"]} == {basis}
    assert 0 < step["mfu"] < 1
    peak = systems.load(system).peak("fp16" if system == "dgx2" else "bf16")
    assert step["mfu"] == pytest.approx(step["flops_per_device"] / peak)  # nothing is recomputed
    page, table = run(capsys, "simulate", *asked)[1], run(capsys, "plan", *few)[1]
    for said in (page, table):
        assert "MFU" in said
        assert f"on: {basis}; " in said
    line = next(line for line in table.splitlines() if line.startswith("2 x 1 x 2"))
    bound = basis == BOUND
    assert ("at least" in page, "≥" in line, "≤" in line) == (bound, bound, bound)
    assert step["interval"]["low_s"] < step["step_s"]
    assert ("by the best values of what is not known" in " ".join(page.split())) == bound
    assert max(map(len, table.splitlines())) <= 80


BAD = [
    ["simulate", "--model", "gpt2-1.5", "--system", "dgx2", "--gpus", "4"],
    ["simulate", "--model", "gpt2-1.5b", "--system", "dgx9", "--gpus", "4"],
    ["simulate", "--model", "bert-large", "--system", "dgx2", "--gpus", "4"],
    ["simulate", *GPT2, "--gpus", "6", "--tp", "4"],
    ["simulate", *GPT2, "--gpus", "0"],
    ["simulate", *GPT2, "--gpus", "8", "--tp", "3"],
    ["simulate", *GPT2, "--gpus", "3", "--tp", "3"],
    ["simulate", *GPT2, "--gpus", "7", "--pp", "7"],
    ["simulate", *GPT2, "--gpus", "4", "--zero", "4"],
    ["simulate", *GPT2, "--gpus", "4", "--seq", "4096"],
    ["simulate", *GPT2, "--gpus", "4", "--seq", "-1"],
    ["simulate", *GPT2, "--gpus", "4", "--global-batch", "3"],
    ["simulate", *GPT2, "--gpus", "4", "--memory-limit", "lots"],
    ["simulate", *GPT2, "--gpus", "4", "--memory-limit", "1GB"],
    ["simulate", *GPT2],
    ["fit", "--system", "yuan", "--gpus", "8"],
    ["fit", "--system", "dgx2", "--gpus", "8", "--search", "width"],
    ["fit", "--system", "dgx2", "--gpus", "8", "--search", "micro-batch"],
    ["fit", "--system", "dgx2", "--gpus", "8", "--hidden", "100", "--heads", "3"],
    ["fit", "--measure", "--system", "dgx2", "--gpus", "8"],
    ["fit", "--measure", "--system", "local", "--gpus", "1"],
    ["fit", "--measure", "--system", "local", "--gpus", "1", "--memory-limit", "1GB", "--expandable"],
    ["fit", "--measure", "--system", "local", "--gpus", "1", "--as-rank", "4", "--of", "4",
     "--memory-limit", "1GB"],
    ["plan", "--model", "gpt2-1.5b", "--system", "yuan", "--gpus", "8"],
    ["plan", *GPT2, "--gpus", "8", "--precision", "bf16"],
    ["plan", *GPT2, "--gpus", "8", "--tp", "3"],
    ["plan", *GPT2, "--gpus", "8", "--price-per-gpu-hour", "2"],
    ["plan", *GPT2, "--gpus", "8", "--tokens", "-1"],
    ["plan", *GPT2, "--gpus", "8", "--map", "--tokens", "1e9"],
    ["plan", *GPT2, "--gpus", "8", "--global-batch", "3"],
    ["plan", *GPT2, "--gpus", "8", "--dp", "3"],
    ["plan", *GPT2, "--gpus", "8", "--top", "0"],
    ["plan", *GPT2, "--gpus", "8", "--map", "--top", "3"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


def test_bad_input_is_found_before_torch_is_imported() -> None:
    code = (
        "import sys, repro.cli\n"
        "codes = {repro.cli.main(arguments) for arguments in " + repr(BAD) + "}\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{2} False", done.stderr


PLANS = """
import sys
import repro.cli
from repro.host import workers
if __name__ == "__main__":
    workers.usable_cores = lambda: 2
    workers.available_bytes = lambda: 2**40
    plan = "plan --model gpt2-1.5b --system dgx1-v100-32gb --gpus 8 --tp 1 --pp 4 --zero 1 --micro-batch 1 --top 1"
    print(repro.cli.main([*plan.split(), "--json"]), "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_plan_leaves_torch_to_its_workers(tmp_path: Path) -> None:
    """They have it from one process that imports it while the plan begins."""
    script = tmp_path / "plans.py"
    script.write_text(PLANS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] == ["0 False"], done.stderr


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("32GB", 32 * 10**9),
        ("32GiB", 32 * 2**30),
        ("16e9", 16 * 10**9),
        ("1.5 TB", 1.5e12),
        ("500mb", 5 * 10**8),
        ("7b", 7),
        ("", None),
    ],
)
def test_sizes(text: str, bytes_: float | None) -> None:
    assert memory_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["x", "-3", "0", "32 G", "1e99", "GB", "nan"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="memory_limit"):
        memory_bytes(text)


def test_every_key_of_a_layout_is_an_option_with_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    """But dp, which the GPUs give, lists, and what only a library does."""
    without = {"dp", "stage_layers", "offload_optimizer"}
    assert set(LAYOUT) == {field.name for field in fields(Layout)} - without
    assert cli.main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "--no-recompute",
        "--zero1-reduce",
        "Axes from neighbouring ranks outwards",
        "Default: 1f1b.",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", *GPT2, "--gpus", "8", "--tp", "2"], "error: --tp = 2: must be a divisor of heads = 25"),
        (
            ["plan", *GPT2, "--gpus", "8", "--zero1-reduce", "x"],
            "error: --zero1-reduce = 'x': must be one of reduce-",
        ),
        (["fit", "--system", "dgx2", "--gpus", "0"], "error: --gpus = 0: must be a whole number"),
        (["fit", "--measure", "--system", "local", "--gpus", "1"], "error: --memory-limit: is needed"),
        (
            ["simulate", "--model", "gpt2", "--system", "dgx2", "--gpus", "1"],
            "error: --model = 'gpt2': no such",
        ),
    ],
)
def test_what_is_wrong_is_said_of_the_option(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(says)


def test_what_is_wrong_in_a_file_is_said_of_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("layers = 4\nhidden = 128\nheads = 3\nvocab = 512\nseq = 64\n")
    assert cli.main(["fit", "--model", str(path), "--system", "dgx2", "--gpus", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: odd.heads = 3")


@pytest.fixture
def tiny_model(tmp_path: Any) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("layers = 4\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    return str(path)


@pytest.mark.parametrize(
    ("gpus", "said"), [("400", ""), ("800", "note: 800 GPUs are more than the 400 of dgx2 (25 nodes of 16)")]
)
def test_more_than_anybody_had_is_said(gpus: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["simulate", *GPT2, "--gpus", gpus, "--json"])
    err = capsys.readouterr().err
    assert err.startswith(said) if said else not err


def test_context_parallelism_of_fit_and_plan(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    """Two ranks that share a sample's tokens hold more layers than two that have a sample each."""
    asked = [*FIT[:-1], "2048", "--memory-limit", "1.5GB", "--json"]
    found = [json.loads(run(capsys, *asked, "--cp", str(cp))[1]) for cp in (1, 2)]
    assert [(fit["layout"]["cp"], fit["layout"]["dp"]) for fit in found] == [(1, 2), (2, 1)]
    alone, shared = (fit["largest"]["layers"] for fit in found)
    assert alone < shared <= 2 * alone + 1
    asked = ["plan", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--global-batch", "8"]
    few = ["--zero", "1", "--micro-batch", "1", "--no-sp", "--no-recompute"]
    code, out = run(capsys, *asked, *few, "--cp", "2", "--json")
    assert code == 0
    assert {row["layout"]["cp"] for row in json.loads(out)} == {2}
    assert cli.main([*asked, "--cp", "3"]) == 2
    assert "tp x cp x pp = 1 x 3 x 1" in capsys.readouterr().err
