"""Tests of `repro plan --map`: degrees of tp and pp that fit each memory limit, and reasons against the others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from repro import cli
from repro.config import systems
from repro.simulate.plan.rows import OK, OOM

CONTEXT = systems.load_system_file("dgx2").context()
LIMITS = (CONTEXT + 271e6, CONTEXT + 1e9)

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("layers = 2\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    return str(path)


def map_command(model: str, *limits: float, gpus: int = 4, batch: int = 8) -> list[str]:
    plan = ["plan", "--model", model, "--system", "dgx2", "--gpus", str(gpus), "--global-batch", str(batch)]
    return [*plan, "--recompute", "--map", "--memory-limit", ",".join(f"{limit:.0f}" for limit in limits)]


def test_json_has_every_cell_for_every_limit(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    assert cli.main([*map_command(tiny_model, *LIMITS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits_bytes"] == [int(limit) for limit in LIMITS]
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
            assert answer["memory"]["limit_bytes"] == int(limit) - int(CONTEXT) - communicators
            assert bool(answer["ruled_out_by"]) == (answer["outcome"] == OOM)
    first = {answer["outcome"] for cell in found["cells"] for answer in cell["answers"][:1]}
    assert OOM in first


def test_text_shows_the_map_and_causes(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    assert cli.main([*map_command(tiny_model, *LIMITS), "--pp", "1"]) == 0
    out = capsys.readouterr().out
    for words in (
        "micro-batch 1, global batch 8",
        "recomputation",
        "pp 1 ",
        "tp 2 ",
        "fits 2.34 GB",
        ": all fit",
        "does not fit tp x pp",
    ):
        assert words in out
    assert re.search(r", (parameters|gradients|optimizer states): \d x \d", out)
    assert max(map(len, out.splitlines())) <= 100
    assert cli.main(map_command(tiny_model, CONTEXT + 1e5)) == 1, "no layout fits"
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "1", "--pp", "1", "--global-batch", "7"], "error: --global-batch = 7"),
        (["--memory-limit", "40GB,much"], "error: --memory-limit = 'much': must be a size in bytes"),
    ],
)
def test_error_of_wrong_options_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    assert cli.main([*map_command(tiny_model, 3e9), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(message)


def test_several_memory_limits_need_a_map(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    command = [argument for argument in map_command(tiny_model, *LIMITS) if argument != "--map"]
    assert cli.main(command) == 2
    assert "one size, or use --map" in capsys.readouterr().err
