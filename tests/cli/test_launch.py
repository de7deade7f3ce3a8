"""Tests of `--launch` and `--from`, which write and read launch files of other frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.cli import main

SYSTEM_OPTIONS = ["--system", "dgx-h100", "--gpus", "8"]


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--model: is missing; name a model, or a file by --from"),
        ("--model gpt2-1.5b --launch megatron", "--launch = 'megatron': needs --output"),
        ("--model gpt2-1.5b --output x", "--launch = '': needs --output, and --output needs --launch"),
        ("--model gpt2-1.5b --launch jax --output x", "must be one of megatron, torchtitan"),
        ("--from none.sh", "--from = 'none.sh': cannot be read"),
        ("--from none.txt", "must be a file that ends in .sh, .toml, .json"),
    ],
)
def test_error_of_wrong_options_is_one_line(
    capsys: pytest.CaptureFixture[str], command: str, options: str, message: str
) -> None:
    assert main([command, *options.split(), *SYSTEM_OPTIONS]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_written_file_has_the_prediction_of_its_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tp", "2", "--zero", "1", "--grad-dtype", "fp32", "--global-batch", "16"]
    written = ["--launch", "megatron", "--output", str(tmp_path)]
    assert main(["simulate", "--model", "llama3-8b", *SYSTEM_OPTIONS, *options, *written]) == 0
    planned, note = capsys.readouterr()
    assert "with options for every key of the layout" in note
    assert main(["simulate", "--from", str(tmp_path / "megatron.sh"), *SYSTEM_OPTIONS]) == 0
    read, note = capsys.readouterr()
    assert note == ""

    def numbers(text: str) -> list[str]:
        return [
            line
            for line in text.splitlines()
            if line.startswith(("Predicted step time", "gradients", "Layout"))
        ]

    assert numbers(read) == numbers(planned) != []
