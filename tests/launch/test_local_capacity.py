"""Tests of the memory check before a run, which exempts experiments that should run out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from repro import cli
from repro.config import suites
from repro.launch import local_launch

FREE = 10 * 10**9
SUITE = """
[suite]
name = "large"
[[experiment]]
name = "states"
model = "gpt2-1.5b"
layout = { dp = 2, zero = 1 }
[[experiment]]
name = "batch"
model = "gpt2-tiny"
layout.micro_batch = 100_000
[[experiment]]
name = "meant"
model = "gpt2-1.5b"
layout.dp = 2
expect = "oom"
[[experiment]]
name = "limited"
model = "gpt2-1.5b"
layout.dp = 2
limits.memory_bytes = 1_000_000_000
[[experiment]]
name = "small"
model = "gpt2-tiny"
"""
STATE_BYTES = 1_557_611_200 * (2 * 8 + 8)
"""fp32 parameters and gradients on both ranks, and the two Adam states, which ZeRO-1 partitions."""
INPUT_BYTES = 4 * 128 * 128 * 4
"""Block inputs of one sample: 4 blocks of gpt2-tiny, 128 tokens, hidden size 128, fp32."""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: FREE)
    path = tmp_path / "large.toml"
    path.write_text(SUITE)
    return str(path)


def test_dry_run_names_missing_memory(suite: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["run", suite, "--dry-run", "--json", "--results", str(tmp_path / "none")]) == 0
    reasons = {
        row["name"]: row["where"] for row in json.loads(capsys.readouterr().out) if row["state"] == "not here"
    }
    assert set(reasons) == {"states", "batch"}
    max_count = int(1_557_611_200 * FREE / STATE_BYTES)
    assert reasons["states"] == (
        "needs 37.4 GB of memory for model states alone, and 10 GB are free here; model = 'gpt2-1.5b' has "
        f"1,557,611,200 parameters, and at most {max_count:,} fit in this layout; "
        "`--evidence simulated` simulates the experiment here"
    )
    max_samples = int(reasons["batch"].split("at most ")[1].split(" ")[0])
    states = 16 * 7_248_640
    assert 0 <= FREE - states - max_samples * INPUT_BYTES < INPUT_BYTES


@pytest.mark.parametrize(
    ("shape", "states", "samples"),
    [
        ("cp = 2, zero = 0", 2 * 16, 1),  # both ranks have all states and half of the tokens
        ("cp = 2, zero = 3", 16, 1),
        ("cp = 2, dp = 2, zero = 0", 4 * 16, 2),
    ],
)
def test_context_parallel_ranks_share_the_tokens_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, states: int, samples: int
) -> None:
    path = tmp_path / "cp.toml"
    experiment = f'name = "a"\nmodel = "gpt2-tiny"\nlayout = {{ {shape}, micro_batch = 10 }}\n'
    path.write_text(f'[suite]\nname = "cp"\n[[experiment]]\n{experiment}')
    (entry,) = suites.load_suite(path).entries
    needed = states * 7_248_640 + 10 * samples * INPUT_BYTES
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: needed)
    assert local_launch.memory_shortage(entry.experiment) == ""
    monkeypatch.setattr(local_launch, "memory_and_swap", lambda: needed - 1)
    assert "layout.micro_batch = 10, and at most 9 fit" in local_launch.memory_shortage(entry.experiment)


def test_run_rejects_experiments_that_exceed_memory(
    suite: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    assert cli.main(["run", suite, "--only", "states", "--results", str(results)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f'error: {suite}: experiment "states": not run: needs 37.4 GB of memory for model states'
    )
    assert not results.exists()
