"""Tests of `repro plan`: JSON and text, several systems, prices, the next command, and worker processes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from repro import cli
from repro.util import units
from tests.cli.predictions import GPT2, run

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


def test_plan_prints_rows(
    capsys: pytest.CaptureFixture[str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["plan", "--model", tiny_model, "--system", "dgx2", "--gpus", "4", "--global-batch", "8"]
    plan += ["--micro-batch", "1", "--memory-limit", "1.764GB", "--zero", "1", "--no-sp", "--no-recompute"]
    code, out = run(capsys, *plan, "--pp", "1", "--json")
    assert code == 0
    found = json.loads(out)
    keys = {"outcome", "params", "memory", "comm", "flops", "trace_seconds", "layout", "ruled_out_by"}
    assert all(keys <= set(row) for row in found)
    assert found[0]["outcome"] == "ok"
    assert found[0]["evidence"] == "full"
    assert {row["layout"]["zero"] for row in found} == {1}
    two = json.loads(run(capsys, *plan, "--dp", "2", "--top", "1", "--json")[1])
    assert [row["layout"]["dp"] for row in two] == [2]
    printed = run(capsys, *plan, "--top", "1")[1]
    assert [line.split()[0] for line in printed.splitlines() if re.match(r" +\d+ +\d+ ", line)] == ["1"]
    assert {"step_s", "samples_per_s", "flops_per_device", "exposed_s", "bubble_s"} <= set(found[0]["time"])
    priced = [*plan, "--tp", "2", "--tokens", "1e9", "--price-per-gpu-hour", "2.5"]
    code, out = run(capsys, *priced)
    assert code == 0
    trained = json.loads(run(capsys, *priced, "--json")[1])[0]["training"]
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
        code, out = run(capsys, *plan, "--tp", "2", "--details")
        assert code == 0
        for words in ("(samples/s)", "bubble (%)", "2 layouts were simulated"):
            assert words in out
        assert max(map(len, out.splitlines())) <= width


def test_plan_ranks_several_systems_by_cost(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    """The system with the higher price is last. The table has the best layout of each system."""
    plan = ["plan", "--model", tiny_model, "--system", "dgx2,dgx-h100", "--gpus", "4", "--global-batch", "8"]
    plan += ["--micro-batch", "1", "--no-sp", "--no-recompute", "--pp", "1", "--tokens", "1e9"]
    plan += ["--rank-by", "cost", "--price-per-gpu-hour"]
    for prices, names in (("1,1000", ["dgx2", "dgx-h100"]), ("1000,1", ["dgx-h100", "dgx2"])):
        code, out = run(capsys, *plan, prices, "--json")
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
        text = run(capsys, *plan, prices, "--top", "2")[1]
        ranks = re.findall(r"(?m)^ +(\d+) +(dgx2|dgx-h100) ", text)
        assert [name for _, name in ranks] == names
        assert ranks[0][0] == "1"
        assert int(ranks[1][0]) == 1 + [name for name, _ in trained].index(names[1])
        assert f"on 4 x NVIDIA {'H100' if names[0] == 'dgx-h100' else 'V100'}" in text
        next_command = " ".join(text.partition("Next: ")[2].replace("\\\n", "").split())
        assert f"--system {names[0]} " in next_command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--system dgx2,dgx3", "--system = 'dgx3': did you mean dgx2?"),
        ("--system dgx2,dgx2", "--system = 'dgx2,dgx2': must be one system, or different systems"),
        (
            "--system selene,dgx-a100",
            "--system = 'selene,dgx-a100': must be one system, or different systems",
        ),
        ("--system dgx2,selene --map", "--system = 'dgx2,selene': must be one system with --map"),
        (
            "--system selene --rank-by cost",
            "--tokens = 0.0: must be more than 0 with --price-per-gpu-hour and",
        ),
        (
            "--system selene,dgx2 --rank-by cost --tokens 1e9",
            "--rank-by = 'cost': needs the key device.price_per_hour, which dgx2 lacks, or --price-per-gpu-hour",
        ),
        (
            "--system selene,dgx2 --tokens 1e9 --price-per-gpu-hour 2",
            "--price-per-gpu-hour = '2': must be 2 prices above 0, with commas between them",
        ),
        (
            "--system dgx2 --tokens 1e9 --price-per-gpu-hour x",
            "--price-per-gpu-hour = 'x': must be 1 price above",
        ),
        (
            "--system dgx2 --tokens 1e9 --price-per-gpu-hour 0",
            "--price-per-gpu-hour = '0': must be 1 price above",
        ),
    ],
)
def test_error_of_wrong_systems_or_prices_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    """The error precedes the search of layouts."""
    monkeypatch.delattr("repro.simulate.plan.plan.search_layouts")
    assert cli.main(["plan", "--model", "gpt2-1.5b", "--gpus", "8", *options.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {message}")


def test_next_command_simulates_the_best_layout(
    capsys: pytest.CaptureFixture[str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has all options of the plan, so both commands show the same memory."""
    options = (
        "--system dgx2 --gpus 4 --global-batch 8 --tp 2 --sp --no-overlap --precision fp32 --top 1 --seq 32"
    )
    _, out = run(capsys, "plan", "--model", tiny_model, *options.split())
    command = out.partition("Next: repro ")[2].replace("\\\n", " ")
    layout = " ".join(out.partition("Best layout: ")[2].partition(".\n")[0].split())
    code, step = run(capsys, *shlex.split(command))
    assert code == 0
    assert f"Layout: {layout}. Model: " in " ".join(step.split())
    assert "32 tokens" in step


def test_plan_without_a_layout_that_fits_fails(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", *GPT2, "--gpus", "4", "--memory-limit", "4GB"]
    code, out = run(capsys, *plan)
    assert code == 1
    assert "No layout fits" in out
    assert "optimizer states (" in out
    assert "closed form" in run(capsys, *plan, "--details")[1]
    code, out = run(capsys, *plan, "--json")
    assert code == 1
    assert all(row["outcome"] == "oom" and row["ruled_out_by"] for row in json.loads(out))


@pytest.mark.slow
def test_only_worker_processes_of_a_plan_import_torch(tmp_path: Path) -> None:
    """A fork server imports torch while the plan starts, and the workers are forked from the server."""
    script = tmp_path / "plans.py"
    script.write_text(PLANS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] == ["0 False"], done.stderr
