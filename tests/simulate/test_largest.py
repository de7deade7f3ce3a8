"""Tests of the largest accepted sizes: a simulation ends and needs less than 4 GiB of host memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from repro.config import sizes

MAX_HOST_BYTES = 4 * 2**30
CODE = "import sys; from repro.cli import main; sys.exit(main())"
DEEP_MODEL = f"layers = {sizes.LAYERS.value}\nhidden = 64\nheads = 4\nvocab = 512\nseq = 128\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        f"--model gpt2-1.5b --gpus {sizes.RANKS.value} --zero 3",
        "--model deep.toml --gpus 8 --zero 3 --recompute",
        f"--model gpt2-1.5b --gpus 8 --pp 8 --global-batch {sizes.MICRO_BATCHES.value // 8}",
    ],
    ids=["ranks", "layers", "micro-batches"],
)
def test_a_simulation_of_the_largest_size_ends(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(DEEP_MODEL)
    process = subprocess.run(
        [sys.executable, "-c", CODE, "simulate", "--system", "dgx2", "--json", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MAX_HOST_BYTES, MAX_HOST_BYTES)),
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    assert '"outcome"' in process.stdout
