"""Tests of kernel launches with a fake driver: arguments, contexts and refused launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.kernels import gelu
from repro.kernels.cuda import device
from tests.kernels.fake_driver import INVALID_CONTEXT, REFUSED, Driver, install, launch_arguments

KIND = gelu.program("float", "float", 4)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


def test_launch_passes_grid_stream_and_arguments(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    launch = driver.cuLaunchKernel

    def record(*arguments: Any) -> tuple[int]:
        seen.append(launch_arguments(arguments, KIND.arguments.size))
        return launch(*arguments)

    monkeypatch.setattr(Driver, "cuLaunchKernel", lambda self, *arguments: record(*arguments))
    x, bias = torch.ones(3, 8), torch.ones(8)
    y = gelu.launch_bias_gelu(device.cuda_launcher(-1), x, bias)
    ((function, *shape),) = driver.launches
    assert function == "forward"
    assert shape[:8] == [1, 1, 1, KIND.threads, 1, 1, 0, 77]
    assert KIND.arguments.unpack(seen[0])[:4] == (x.data_ptr(), bias.data_ptr(), 0, y.data_ptr())


def test_launch_sets_a_missing_context(driver: Driver) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.statuses = [INVALID_CONTEXT]
    loaded.launch("forward", 1, bytes(KIND.arguments.size))
    assert driver.contexts == len(driver.launches) == 1


def test_launch_makes_its_device_current(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [0, -1]
    monkeypatch.setattr(device, "_current_device", lambda: devices.pop(0))
    device.cuda_launcher(-1).load(KIND).launch("forward", 1, bytes(KIND.arguments.size))
    assert not devices
    assert len(driver.launches) == 1


def test_a_refused_launch_is_an_error(driver: Driver) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.statuses = [REFUSED]
    with pytest.raises(RuntimeError, match="CUDA kernel forward was not launched on cuda:-1: error 1"):
        loaded.launch("forward", 1, bytes(KIND.arguments.size))
