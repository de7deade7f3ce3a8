"""Tests of `repro plan` (JSON and text, several systems, prices, maps, worker processes) and of `repro fit`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import ConfigError, Layout, models, systems
from repro.config.engines import unfused_attention_note
from repro.config.systems import load_system_file
from repro.report.text.fit_and_plan import print_fits
from repro.simulate.plan.candidates import parse_memory_size
from repro.simulate.plan.rows import OK, OOM
from repro.util import units
from tests.cli.conftest import FIT, GPT2, Run

pytestmark = pytest.mark.usefixtures("in_process")
PLANS = """
import sys
import repro.cli
from repro.util import processes
if __name__ == "__main__":
    processes.usable_cores = lambda: 2
    processes.available_bytes = lambda: 2**40
    plan = "plan --model gpt2-1.5b --system dgx1-v100-32gb --gpus 8 --tp 1 --pp 4 --zero 1 --micro-batch 1 --top 1"
    print(repro.cli.main([*plan.split(), "--json"]), "torch" in sys.modules, file=sys.stderr)
"""


def test_plan_prints_rows(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ["plan", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--global-batch", "8"]
    plan += ["--micro-batch", "1", "--memory-limit", "1.764GB", "--zero", "1", "--no-sp", "--no-recompute"]
    code, out = run(*plan, "--pp", "1", "--json")
    assert code == 0
    found = json.loads(out)
    keys = {"outcome", "params", "memory", "comm", "flops", "trace_seconds", "layout", "ruled_out_by"}
    assert all(keys <= set(row) for row in found)
    assert (found[0]["outcome"], found[0]["evidence"]) == ("ok", "full")
    assert {(row["layout"]["zero"], row["layout"]["cp"]) for row in found} == {(1, 1)}
    assert {row["layout"]["cp"] for row in json.loads(run(*plan, "--cp", "2", "--json")[1])} == {2}
    two = json.loads(run(*plan, "--dp", "2", "--top", "1", "--json")[1])
    assert [row["layout"]["dp"] for row in two] == [2]
    printed = run(*plan, "--top", "1")[1]
    assert [line.split()[0] for line in printed.splitlines() if re.match(r" +\d+ +\d+ ", line)] == ["1"]
    assert {"step_s", "samples_per_s", "flops_per_device", "exposed_s", "bubble_s"} <= set(found[0]["time"])
    priced = [*plan, "--tp", "2", "--tokens", "1e9", "--price-per-gpu-hour", "2.5"]
    code, out = run(*priced)
    assert code == 0
    trained = json.loads(run(*priced, "--json")[1])[0]["training"]
    parts = []
    for key, before, after in (("days", "", " days"), ("energy_mwh", "", " MWh"), ("cost", "$", "")):
        ends = (units.number(trained["interval"][end][key]) for end in ("low", "high"))
        parts.append(f"{before}{units.number(trained[key])}{after} ({' to '.join(ends)})")
    assert f"Training on 1e+09 tokens (90 % intervals): {', '.join(parts)}." in " ".join(out.split())
    for words in ("Best layout: tp 2 x dp 2", "Predicted step time: ", "90 % interval", "MFU", "peak memory"):
        assert words in out
    assert "samples/s" not in out
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out = run(*plan, "--tp", "2", "--details")
        assert code == 0
        for words in ("(samples/s)", "bubble (%)", "2 layouts were simulated"):
            assert words in out
        assert max(map(len, out.splitlines())) <= width


def test_plan_ranks_several_systems_by_cost(run: Run, tiny_model: str) -> None:
    """The system with the higher price is last. The table has the best layout of each system."""
    plan = ["plan", "--model", tiny_model, "--system", "dgx2,dgx-h100", "--gpus", "4", "--global-batch", "8"]
    plan += ["--micro-batch", "1", "--no-sp", "--no-recompute", "--pp", "1", "--tokens", "1e9"]
    plan += ["--rank-by", "cost", "--price-per-gpu-hour"]
    for prices, names in (("1,1000", ["dgx2", "dgx-h100"]), ("1000,1", ["dgx-h100", "dgx2"])):
        code, out = run(*plan, prices, "--json")
        assert code == 0
        rows = json.loads(out)
        trained = [(row["system"], row["training"]["cost"]) for row in rows]
        assert list(dict(trained)) == names
        price = dict(zip(("dgx2", "dgx-h100"), map(float, prices.split(",")), strict=True))
        for row in rows:
            seconds = 1e9 / (8 * 64 / row["time"]["step_s"])
            assert row["training"]["cost"] == pytest.approx(seconds / 3600 * 4 * price[row["system"]])
        costs = [row["rank_s"] * price[row["system"]] for row in rows if row["rank_s"] and not row["tight"]]
        assert costs == sorted(costs)
        text = run(*plan, prices, "--top", "2")[1]
        ranks = re.findall(r"(?m)^ +(\d+) +(dgx2|dgx-h100) ", text)
        assert [name for _, name in ranks] == names
        assert ranks[0][0] == "1"
        assert int(ranks[1][0]) == 1 + [name for name, _ in trained].index(names[1])
        assert f"on 4 x NVIDIA {'H100' if names[0] == 'dgx-h100' else 'V100'}" in text
        next_command = " ".join(text.partition("Next: ")[2].replace("\\\n", "").split())
        assert f"--system {names[0]} " in next_command


def test_next_command_simulates_the_best_layout(
    run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has all options of the plan, so both commands show the same memory."""
    options = "--system dgx2 --gpus 4 --global-batch 8 --tp 2 --sp --no-overlap --precision fp32 --top 1"
    _, out = run("plan", "--model", tiny_model, *options.split(), "--seq", "32")
    command = out.partition("Next: repro ")[2].replace("\\\n", " ")
    layout = " ".join(out.partition("Best layout: ")[2].partition(".\n")[0].split())
    code, step = run(*shlex.split(command))
    assert code == 0
    assert f"Layout: {layout}. Model: " in " ".join(step.split())
    assert "32 tokens" in step


def test_plan_without_a_layout_that_fits_fails(run: Run) -> None:
    plan = ["plan", *GPT2, "--gpus", "4", "--memory-limit", "4GB"]
    code, out = run(*plan)
    assert code == 1
    assert "No layout fits" in out
    assert "optimizer states (" in out
    assert "closed form" in run(*plan, "--details")[1]
    code, out = run(*plan, "--json")
    assert code == 1
    assert all(row["outcome"] == "oom" and row["ruled_out_by"] for row in json.loads(out))


@pytest.mark.slow
def test_only_worker_processes_of_a_plan_import_torch(tmp_path: Path) -> None:
    """A fork server imports torch while the plan starts, and the workers are forked from the server."""
    script = tmp_path / "plans.py"
    script.write_text(PLANS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] == ["0 False"], done.stderr


CONTEXT = systems.load_system_file("dgx2").context()
LIMITS = (CONTEXT + 271_000_000, CONTEXT + 1_000_000_000)
TWO_LIMITS = ",".join(map(str, LIMITS))


@pytest.fixture
def map_command(tiny_model: str) -> list[str]:
    """Return the command of a map for a model of two layers, without memory limits."""
    path = Path(tiny_model)
    path.write_text(path.read_text().replace("layers = 4", "layers = 2"))
    options = "--system dgx2 --gpus 4 --global-batch 8 --recompute --map --memory-limit"
    return ["plan", "--model", tiny_model, *options.split()]


def test_json_of_a_map_has_every_cell_for_every_limit(run: Run, map_command: list[str]) -> None:
    code, out = run(*map_command, TWO_LIMITS, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["limits_bytes"] == list(LIMITS)
    assert len({(cell["tp"], cell["pp"]) for cell in found["cells"]}) == len(found["cells"]) == 6
    for cell in found["cells"]:
        if not cell["answers"]:
            assert (cell["tp"], cell["pp"]) == (4, 2)
            assert cell["reason"].startswith("gpus = 4: must be a multiple of tp x pp")
            continue
        assert cell["tp"] * cell["pp"] * cell["dp"] == 4
        outcomes = [answer["outcome"] for answer in cell["answers"]]
        assert outcomes == sorted(outcomes, reverse=True), "a layout that fits also fits a larger limit"
        assert outcomes[-1] == OK
        for limit, answer in zip(LIMITS, cell["answers"], strict=True):
            layout = answer["layout"]
            assert (layout["zero"], layout["micro_batch"], layout["recompute"]) == (0, 1, True)
            communicators = answer["memory"]["communicator_bytes"]
            assert answer["memory"]["limit_bytes"] == limit - CONTEXT - communicators
            assert bool(answer["ruled_out_by"]) == (answer["outcome"] == OOM)
    first = {answer["outcome"] for cell in found["cells"] for answer in cell["answers"][:1]}
    assert OOM in first


def test_text_of_a_map_shows_the_causes(run: Run, map_command: list[str]) -> None:
    code, out = run(*map_command, TWO_LIMITS, "--pp", "1")
    assert code == 0
    for words in (
        "micro-batch 1, global batch 8",
        "recomputation",
        "pp 1 ",
        "tp 2 ",
        "fits 2.34 GB",
        ": all fit",
    ):
        assert words in out
    assert "tp x pp with more than" in out
    assert re.search(r", due to (parameters|gradients|optimizer states): \d x \d", out)
    assert max(map(len, out.splitlines())) <= 100
    code, out = run(*map_command, str(CONTEXT + 100_000))
    assert (code, "does not fit" in out) == (1, True)


def test_memory_size_is_parsed_or_refused() -> None:
    sizes = {
        "32GB": 32e9,
        "32GiB": 32 * 2**30,
        "16e9": 16e9,
        "1.5 TB": 1.5e12,
        "500mb": 5e8,
        "7b": 7,
        "": None,
    }
    assert {text: parse_memory_size(text) for text in sizes} == sizes
    for text in ("x", "-3", "0", "32 G", "1e99", "GB", "nan"):
        with pytest.raises(ConfigError, match="memory_limit"):
            parse_memory_size(text)


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
