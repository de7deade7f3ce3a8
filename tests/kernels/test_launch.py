"""What a launch hands to the driver, and what it does when the driver refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.kernels import gelu
from repro.kernels.cuda import device
from tests.kernels.fake_driver import INVALID_CONTEXT, REFUSED, Driver, install, passed

KIND = gelu.program("float", "float", 4)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


def test_function_grid_stream_and_arguments(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    launch = driver.cuLaunchKernel

    def look(*arguments: Any) -> tuple[int]:
        seen.append(passed(arguments, KIND.arguments.size))
        return launch(*arguments)

    monkeypatch.setattr(Driver, "cuLaunchKernel", lambda self, *arguments: look(*arguments))
    x, bias = torch.ones(3, 8), torch.ones(8)
    y = gelu.launch_bias_gelu(device.cuda_launcher(-1), x, bias)
    ((function, *shape),) = driver.launches
    assert function == "forward"
    assert shape[:8] == [1, 1, 1, KIND.threads, 1, 1, 0, 77]
    assert KIND.arguments.unpack(seen[0])[:4] == (x.data_ptr(), bias.data_ptr(), 0, y.data_ptr())


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.answers = [INVALID_CONTEXT]
    loaded.launch("forward", 1, bytes(KIND.arguments.size))
    assert driver.contexts == len(driver.launches) == 1


def test_another_device_is_made_current(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [0, -1]
    monkeypatch.setattr(device, "_current_device", lambda: places.pop(0))
    device.cuda_launcher(-1).load(KIND).launch("forward", 1, bytes(KIND.arguments.size))
    assert not places
    assert len(driver.launches) == 1


def test_a_launch_that_is_refused_is_an_error(driver: Driver) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.answers = [REFUSED]
    with pytest.raises(RuntimeError, match="CUDA kernel forward was not launched on cuda:-1: error 1"):
        loaded.launch("forward", 1, bytes(KIND.arguments.size))
