"""Provide the fixtures of the command-line tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from repro import cli
from tests.launch.slurm.conftest import site, slurm, submitted  # noqa: F401

FIT = [
    *("fit", "--system", "dgx2", "--gpus", "2"),
    *("--hidden", "128", "--heads", "4", "--vocab", "512", "--seq", "64"),
]
GPT2 = ["--model", "gpt2-1.5b", "--system", "dgx2"]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns its exit code and output."""
    return lambda *arguments: (cli.main(list(arguments)), capsys.readouterr().out)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report one core, so that commands start no worker processes."""
    from repro.util import processes

    monkeypatch.setattr(processes, "usable_cores", lambda: 1)


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("layers = 4\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    return str(path)


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cli.samples import prepare

    folder = tmp_path_factory.mktemp("samples")
    prepare(folder)
    return folder


@pytest.fixture
def samples_folder(prepared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in the folder with the files that the samples of the commands name."""
    monkeypatch.chdir(prepared_folder)
