"""Tests of the local machine as a system."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from repro.config import ConfigError
from repro.measure import local_system
from repro.measure.local_system import load_system


def test_local_system_has_the_properties_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_system, "has_nvlink", lambda: True)
    gpu = {"name": "V100", "compute_capability": "7.0", "memory_bytes": 2**34}
    monkeypatch.setattr(local_system, "gpus", lambda: [gpu, gpu | {"name": "A100"}])
    system = load_system("local")
    device = system.device
    assert (device.name, device.compute_capability, system.devices_per_node.value) == ("V100", "7.0", 2)
    assert "A100" in system.note
    assert list(system.links) == ["nvlink", "pcie"]
    assert system.context() > 0
    monkeypatch.setattr(local_system, "has_nvlink", lambda: False)
    assert load_system("local").link_inside() == "pcie"


def test_local_system_without_gpus_has_no_assumed_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_system, "gpus", list)
    system = load_system("local")
    assert system.link_inside() == "memory"
    assert (system.device.memory_bandwidth.value, system.device.peak_flops) == (None, {}), "not measured"
    with pytest.raises(ConfigError, match="none known"):
        system.peak("fp16")
    assert system.allocatable_bytes() == system.device.memory_bytes.value == system.host_memory_bytes.value


@pytest.mark.parametrize(("states", "answer"), [([0, 1], True), ([0, 0], False), (RuntimeError, False)])
def test_nvlink_is_read_from_the_driver(monkeypatch: pytest.MonkeyPatch, states: Any, answer: bool) -> None:
    driver = Mock(NVMLError=RuntimeError, NVML_NVLINK_MAX_LINKS=2, NVML_FEATURE_ENABLED=1)
    driver.nvmlDeviceGetNvLinkState.side_effect = states
    monkeypatch.setattr(local_system, "nvml", lambda: nullcontext(driver))
    assert local_system.has_nvlink() is answer
