"""Tests of the layout options of `repro simulate`, `fit` and `plan`, and of errors for invalid options."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from repro import cli
from repro.cli.commands.options import LAYOUT
from repro.config import ConfigError, Layout
from repro.simulate.plan.candidates import parse_memory_size
from tests.cli.predictions import GPT2

GPT2_ON = " ".join(GPT2)
MEASURED = "fit --measure --system local --gpus 1"
INVALID = [
    "simulate --model gpt2-1.5 --system dgx2 --gpus 4",
    "simulate --model gpt2-1.5b --system dgx9 --gpus 4",
    "simulate --model bert-large --system dgx2 --gpus 4",
    f"simulate {GPT2_ON} --gpus 6 --tp 4",
    f"simulate {GPT2_ON} --gpus 0",
    f"simulate {GPT2_ON} --gpus 8 --tp 3",
    f"simulate {GPT2_ON} --gpus 3 --tp 3",
    f"simulate {GPT2_ON} --gpus 7 --pp 7",
    f"simulate {GPT2_ON} --gpus 4 --zero 4",
    f"simulate {GPT2_ON} --gpus 4 --seq 4096",
    f"simulate {GPT2_ON} --gpus 4 --seq -1",
    f"simulate {GPT2_ON} --gpus 4 --global-batch 3",
    f"simulate {GPT2_ON} --gpus 4 --memory-limit lots",
    f"simulate {GPT2_ON} --gpus 4 --memory-limit 1GB",
    f"simulate {GPT2_ON}",
    "fit --system yuan --gpus 8",
    "fit --system dgx2 --gpus 8 --search width",
    "fit --system dgx2 --gpus 8 --search micro-batch",
    "fit --system dgx2 --gpus 8 --hidden 100 --heads 3",
    "fit --measure --system dgx2 --gpus 8",
    MEASURED,
    f"{MEASURED} --memory-limit 1GB --expandable",
    f"{MEASURED} --memory-limit 1GB --as-rank 4 --of 4",
    "plan --model gpt2-1.5b --system yuan --gpus 8",
    *(
        f"plan {GPT2_ON} --gpus 8 {options}"
        for options in (
            "--precision bf16",
            "--tp 3",
            "--price-per-gpu-hour 2",
            "--tokens -1",
            "--map --tokens 1e9",
            "--global-batch 3",
            "--dp 3",
            "--top 0",
            "--map --top 3",
        )
    ),
    *(f"{command} {GPT2_ON} --gpus 8 --recompute-selective" for command in ("simulate", "plan", "fit")),
]


def test_every_layout_key_has_an_option_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys without an option: dp, which follows from the GPUs; lists; and keys of other engines."""
    without = {"dp", "stage_layers", "offload_optimizer"}
    assert set(LAYOUT) == {field.name for field in fields(Layout)} - without
    assert cli.main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "--no-recompute",
        "--zero1-reduce",
        "ranks of the first axis are consecutive",
        "Default: 1f1b.",
    ):
        assert words in out


def test_error_is_one_line_before_torch_is_imported() -> None:
    code = (
        "import sys, repro.cli\n"
        f"for command in {INVALID!r}:\n"
        "    code = repro.cli.main(command.split())\n"
        "    print(command, code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{command} 2 False" for command in INVALID], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(INVALID), done.stderr
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"simulate {GPT2_ON} --gpus 8 --tp 2", "error: --tp = 2: must be a divisor of heads = 25"),
        (f"plan {GPT2_ON} --gpus 8 --zero1-reduce x", "error: --zero1-reduce = 'x': must be one of reduce-"),
        ("fit --system dgx2 --gpus 0", "error: --gpus = 0: must be an integer"),
        (MEASURED, "error: --memory-limit: is required"),
        ("simulate --model gpt2 --system dgx2 --gpus 1", "error: --model = 'gpt2': no such"),
    ],
)
def test_error_names_the_wrong_option(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(message)


def test_error_in_a_file_names_the_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("layers = 4\nhidden = 128\nheads = 3\nvocab = 512\nseq = 64\n")
    assert cli.main(["fit", "--model", str(path), "--system", "dgx2", "--gpus", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: odd.heads = 3")


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
def test_memory_size_is_parsed(text: str, bytes_: float | None) -> None:
    assert parse_memory_size(text) == bytes_


@pytest.mark.parametrize("text", ["x", "-3", "0", "32 G", "1e99", "GB", "nan"])
def test_invalid_memory_size_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="memory_limit"):
        parse_memory_size(text)


def test_selective_recomputation_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", *GPT2, "--gpus", "1", "--kernels", "softmax", "--recompute-selective", "--json"]
    cli.main(command)
    assert json.loads(capsys.readouterr().out)["layout"]["recompute"] == "selective"
