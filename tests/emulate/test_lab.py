"""Tests of `repro lab`: an emulated network that runs until a command stops it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from repro.cli import main
from repro.emulate import lab


@pytest.fixture(autouse=True)
def isolate_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate the tests from a running network of the user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("emulation")
def test_lab_starts_shows_uses_and_stops_a_network(capfd: pytest.CaptureFixture[str]) -> None:
    """Another network can start after the keeper of the first one was killed."""
    up = ["lab", "up", "--nodes", "2", "--between", "8e6"]
    assert main(["lab", "check"]) == main(up) == 0
    try:
        assert main(up) == 2
        assert "is already running; `repro lab down` stops it" in capfd.readouterr().err
        assert main(["lab", "status", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["facts"]["rates"]["node sends"] == pytest.approx([8e6, 8e6], rel=0.05)
        assert main(["lab", "exec", "1", "sh", "-c", "cat /proc/net/dev; exit 7"]) == 7
        assert "eth0" in capfd.readouterr().out
        assert main(["lab", "exec", "2", "true"]) == 2
        assert "RANK = 2: must be 0 to 1" in capfd.readouterr().err
        keeper = lab.require_network().facts.keeper
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        assert lab.find_network() is None
        assert main(up) == 0
        assert lab.require_network().facts.keeper != keeper
    finally:
        assert main(["lab", "down"]) == 0
    assert main(["lab", "status"]) == 3


def test_missing_tool_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With an empty PATH, `nsenter` is missing."""
    monkeypatch.setenv("PATH", "/nowhere")
    lab.missing_requirement.cache_clear()
    try:
        assert main(["lab", "check"]) == 1
    finally:
        lab.missing_requirement.cache_clear()
    message = capfd.readouterr().out
    assert (message[:9], message.count("\n")) == ("missing: ", 1)
