"""`repro lab`: a network that stays, by hand."""

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
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from a network that the user has up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("emulation")
def test_a_network_stays_is_shown_runs_commands_and_goes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "check"]) == 0
    assert main(["lab", "up", "--nodes", "2", "--between", "8e6"]) == 0
    try:
        assert main(["lab", "up", "--nodes", "2", "--between", "8e6"]) == 2
        assert "is already running; `repro lab down` stops it" in capfd.readouterr().err
        assert main(["lab", "status", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["facts"]["rates"]["node sends"] == pytest.approx([8e6, 8e6], rel=0.05)
        assert main(["lab", "exec", "1", "sh", "-c", "cat /proc/net/dev; exit 7"]) == 7
        message = capfd.readouterr().out
        assert "eth0" in message
        assert main(["lab", "exec", "2", "true"]) == 2
        assert "RANK = 2: must be 0 to 1" in capfd.readouterr().err
    finally:
        assert main(["lab", "down"]) == 0
    assert main(["lab", "status"]) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("emulation")
def test_after_a_kill_of_its_keeper_no_network_is_up_and_another_can_be() -> None:
    assert main(["lab", "up", "--nodes", "2", "--between", "8e6"]) == 0
    there = lab.require_network()
    os.kill(there.facts.keeper, signal.SIGKILL)
    os.waitpid(there.facts.keeper, 0)
    assert lab.find_network() is None
    assert main(["lab", "up", "--nodes", "2", "--between", "8e6"]) == 0
    assert lab.require_network().facts.keeper != there.facts.keeper
    assert main(["lab", "down"]) == 0


def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without `nsenter` on the path, say."""
    monkeypatch.setenv("PATH", "/nowhere")
    lab.missing_requirement.cache_clear()
    try:
        assert main(["lab", "check"]) == 1
    finally:
        lab.missing_requirement.cache_clear()
    message = capfd.readouterr().out
    assert message.startswith("missing: ")
    assert message.count("\n") == 1


def test_a_network_without_a_rate_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "up", "--nodes", "2"]) == 2
    assert "between = 0.0: must be a rate in bytes/s" in capfd.readouterr().err
