"""Tests of the environment variables that a rank on a GPU sets before it imports torch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from repro.config import Experiment, Layout
from repro.launch.rank import device_settings
from repro.launch.rank.device_settings import (
    AVOID_RECORD_STREAMS_VARIABLE,
    DETERMINISTIC_ENVIRONMENT,
    HIGH_PRIORITY_VARIABLE,
    MAX_CONNECTIONS_VARIABLE,
    apply_gpu_environment,
    choose_gpu_environment,
    current_gpu_environment,
)
from tests.training import tiny

NATIVE = tiny(Layout())


def experiment_of(engine: str, **layout: int) -> Experiment:
    return replace(tiny(Layout(**layout)), engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "avoids"),
    [("2.6.0+cu126", True), ("2.7.1", True), ("2.8.0", False), ("2.10.0a0+git1", False), ("unknown", False)],
)
def test_record_streams_are_avoided_up_to_torch_2_7(version: str, avoids: bool) -> None:
    assert (AVOID_RECORD_STREAMS_VARIABLE in choose_gpu_environment([NATIVE], version)) == avoids


@pytest.mark.parametrize(
    ("others", "connections", "priority"),
    [
        ([], "32", True),
        ([experiment_of("torch", dp=2)], "32", False),
        ([experiment_of("deepspeed", dp=2)], "32", False),
        ([experiment_of("megatron", dp=2)], "32", False),
        ([experiment_of("megatron", tp=2)], "1", False),
        ([experiment_of("megatron", dp=2), experiment_of("megatron", tp=2)], "1", False),
    ],
)
def test_engines_decide_gpu_environment(others: list[Experiment], connections: str, priority: bool) -> None:
    found = choose_gpu_environment([experiment_of("native", tp=2), *others], "2.9.0")
    assert found == {
        MAX_CONNECTIONS_VARIABLE: connections,
        **({HIGH_PRIORITY_VARIABLE: "1"} if priority else {}),
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_deterministic_experiment_makes_the_environment_deterministic(deterministic: bool) -> None:
    found = choose_gpu_environment([NATIVE, tiny(Layout(), deterministic=deterministic)], "2.9.0")
    assert (DETERMINISTIC_ENVIRONMENT.items() <= found.items()) == deterministic
    assert DETERMINISTIC_ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_variables_set_by_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        MAX_CONNECTIONS_VARIABLE,
        AVOID_RECORD_STREAMS_VARIABLE,
        HIGH_PRIORITY_VARIABLE,
        *DETERMINISTIC_ENVIRONMENT,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_settings, "versions", lambda packages: {"torch": "2.6.0"})
    monkeypatch.setattr(
        os, "environ", dict(os.environ) | {HIGH_PRIORITY_VARIABLE: "0", "NCCL_NVLS_ENABLE": "2"}
    )
    apply_gpu_environment([NATIVE, tiny(Layout(), deterministic=True)])
    deterministic = {**DETERMINISTIC_ENVIRONMENT, "NCCL_NVLS_ENABLE": "2"}
    assert current_gpu_environment() == {
        MAX_CONNECTIONS_VARIABLE: "32",
        AVOID_RECORD_STREAMS_VARIABLE: "1",
        HIGH_PRIORITY_VARIABLE: "0",
        **deterministic,
    }
