"""What a rank on a GPU sets before torch is there: chosen by its experiments, unless the user has, and recorded."""

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

OURS = tiny(Layout())


def of(engine: str, **layout: int) -> Experiment:
    return replace(tiny(Layout(**layout)), engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "keeps"),
    [("2.6.0+cu126", True), ("2.7.1", True), ("2.8.0", False), ("2.10.0a0+git1", False), ("unknown", False)],
)
def test_until_torch_2_7_tensors_are_held_and_no_stream_is_recorded(version: str, keeps: bool) -> None:
    assert (AVOID_RECORD_STREAMS_VARIABLE in choose_gpu_environment([OURS], version)) == keeps


@pytest.mark.parametrize(
    ("others", "connections", "priority"),
    [
        ([], "32", True),
        ([of("torch", dp=2)], "32", False),
        ([of("deepspeed", dp=2)], "32", False),
        ([of("megatron", dp=2)], "32", False),
        ([of("megatron", tp=2)], "1", False),
        ([of("megatron", dp=2), of("megatron", tp=2)], "1", False),
    ],
)
def test_libraries_get_what_they_ask_for(others: list[Experiment], connections: str, priority: bool) -> None:
    found = choose_gpu_environment([of("native", tp=2), *others], "2.9.0")
    assert found == {
        MAX_CONNECTIONS_VARIABLE: connections,
        **({HIGH_PRIORITY_VARIABLE: "1"} if priority else {}),
    }


@pytest.mark.parametrize("asked", [False, True])
def test_equal_bits_where_one_experiment_asks_for_them(asked: bool) -> None:
    found = choose_gpu_environment([OURS, tiny(Layout(), deterministic=asked)], "2.9.0")
    assert (DETERMINISTIC_ENVIRONMENT.items() <= found.items()) == asked
    assert DETERMINISTIC_ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
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
    apply_gpu_environment([OURS, tiny(Layout(), deterministic=True)])
    repeatable = {**DETERMINISTIC_ENVIRONMENT, "NCCL_NVLS_ENABLE": "2"}
    assert current_gpu_environment() == {
        MAX_CONNECTIONS_VARIABLE: "32",
        AVOID_RECORD_STREAMS_VARIABLE: "1",
        HIGH_PRIORITY_VARIABLE: "0",
        **repeatable,
    }
