"""Provide the arguments and the runner for tests of `repro simulate`, `fit` and `plan`."""

from __future__ import annotations

import pytest

from repro import cli

FIT = [
    *("fit", "--system", "dgx2", "--gpus", "2"),
    *("--hidden", "128", "--heads", "4", "--vocab", "512", "--seq", "64"),
]
GPT2 = ["--model", "gpt2-1.5b", "--system", "dgx2"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(list(arguments))
    return code, capsys.readouterr().out
