"""`repro plan` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.predictions import GPT2, run

pytestmark = pytest.mark.usefixtures("in_process")
PLANS = """
import sys
import repro.cli
from repro.util import workers
if __name__ == "__main__":
    workers.usable_cores = lambda: 2
    workers.available_bytes = lambda: 2**40
    plan = "plan --model gpt2-1.5b --system dgx1-v100-32gb --gpus 8 --tp 1 --pp 4 --zero 1 --micro-batch 1 --top 1"
    print(repro.cli.main([*plan.split(), "--json"]), "torch" in sys.modules, file=sys.stderr)
"""


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
    shown = (
        "2 layouts for 424 MB a GPU: 2 fit; 2 were simulated",
        "TFLOP/s",
        "MFU",
        "predicted",
        "tp x pp x dp",
    )
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


@pytest.mark.slow
def test_a_plan_leaves_torch_to_its_workers(tmp_path: Path) -> None:
    """They have it from one process that imports it while the plan begins."""
    script = tmp_path / "plans.py"
    script.write_text(PLANS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] == ["0 False"], done.stderr
