"""Provide the fixtures of the command-line tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.slurm.conftest import site, slurm, submitted  # noqa: F401


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
def samples_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the samples of the commands run."""
    from tests.cli.samples import prepare

    folder = tmp_path_factory.mktemp("samples")
    prepare(folder)
    return folder
