"""Tests of size limits: the error has one line with the limit and its reason, and nothing is allocated or started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from repro import cli
from repro.config import ConfigError, Experiment, Layout, Model, Training, sizes
from repro.launch.local_launch import max_ranks

LIMITS = [limit for limit in vars(sizes).values() if isinstance(limit, sizes.SizeLimit)]
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "seq": 128}
SIMULATE = ["simulate", "--model", "gpt2-1.5b", "--system", "dgx2"]


def model(**keys: int) -> Model:
    return Model(name="m", **{**SMALL, **keys})


def experiment(layout: Layout, **keys: int) -> Experiment:
    return Experiment(name="e", model=model(**keys), layout=layout)


TOO_LARGE: dict[str, tuple[Callable[[], object], str]] = {
    "layers": (lambda: model(layers=10**9), "layers = 1000000000"),
    "decoder": (lambda: model(decoder_layers=10**9), "decoder_layers = 1000000000"),
    "width": (lambda: model(hidden=10**12), "hidden = 1000000000000"),
    "heads": (lambda: model(heads=10**9, hidden=10**9), "hidden = 1000000000"),
    "wide heads": (lambda: model(head_dim=10**9), "head_dim = 1000000000"),
    "ffn": (lambda: model(ffn=10**12), "ffn = 1000000000000"),
    "vocabulary": (lambda: model(vocab=10**12), "vocab = 1000000000000"),
    "positions": (lambda: model(seq=10**12), "seq = 1000000000000"),
    "parameters": (lambda: model(layers=4096, hidden=2**20), "parameters = 54"),
    "replicas": (lambda: Layout(dp=10**9), "dp = 1000000000"),
    "ranks": (lambda: Layout(dp=2**12, tp=2**12), "tp x pp x dp = 16777216"),
    "samples": (lambda: Layout(micro_batch=10**12), "micro_batch = 1000000000000"),
    "bucket": (lambda: Layout(bucket_bytes=10**21), "bucket_bytes = 1000000000000000000000"),
    "micro-batches": (lambda: Layout(global_batch=10**6), "x pp x chunks = 1000000"),
    "scheduled": (lambda: Layout(pp=8, global_batch=10**5), "x pp x chunks = 800000"),
    "steps": (lambda: Training(steps=10**12), "steps = 1000000000000"),
    "tensor": (lambda: experiment(Layout(micro_batch=2**20), seq=2**24), "largest tensor = "),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_error_names_the_exceeded_limit_and_its_reason(case: str) -> None:
    make, message = TOO_LARGE[case]
    with pytest.raises(ConfigError) as caught:
        make()
    line = str(caught.value)
    assert message in line
    assert any(f"at most {limit.value:,} ({limit.why})" in line for limit in LIMITS)


@pytest.mark.parametrize(
    "arguments",
    [
        [*SIMULATE, "--gpus", "1000000000"],
        ["plan", *SIMULATE[1:], "--gpus", "1000000000"],
        ["fit", "--system", "dgx2", "--gpus", "1000000000"],
        ["fit", "--system", "dgx2", "--gpus", "8", "--hidden", "100000000000"],
        [*SIMULATE, "--gpus", "8", "--global-batch", "8000000000000"],
    ],
)
def test_commands_reject_too_large_sizes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "at most " in err


def test_run_rejects_too_many_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "s.toml"
    layout = f"layout.dp = {max_ranks().value + 1}"
    suite.write_text(f'[suite]\nname = "s"\n[[experiment]]\nname = "a"\nmodel = "gpt2-tiny"\n{layout}\n')
    assert cli.main(["run", str(suite), "--results", str(tmp_path / "results")]) == 2
    assert (
        f"processes, and this machine runs at most {max_ranks().value} (16 a core" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "--system", "local", "--quick"],
        ["fit", "--system", "local", "--measure", "--memory-limit", "500MB"],
        ["lab", "up", "--between", "8e6", "--nodes"],
    ],
)
def test_commands_reject_too_many_ranks(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    option = [] if command[-1] == "--nodes" else ["--gpus"]
    assert cli.main([*command, *option, str(max_ranks().value + 1)]) == 2
    assert f"at most {max_ranks().value}" in capsys.readouterr().err
