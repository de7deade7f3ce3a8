"""At the largest sizes that are taken a simulation ends, and keeps below 4 GiB of host memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from repro.config import sizes

MOST_BYTES = 4 * 2**30
CODE = "import sys; from repro.cli import main; sys.exit(main())"
DEEP = f"layers = {sizes.LAYERS.value}\nhidden = 64\nheads = 4\nvocab = 512\nseq = 128\n"


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
def test_the_largest_fits_this_machine(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(DEEP)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "simulate", "--system", "dgx2", "--json", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert '"outcome"' in done.stdout
