"""Test the parts of a calibration that only a GPU executes, with a fake GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro import cli
from repro.accuracy.calibrate import calibration, plan, target
from repro.accuracy.calibrate import clock as clock_module
from repro.accuracy.calibrate.calibration import LocalMachine
from repro.accuracy.calibrate.clock import OperatorClock, OperatorTiming, SustainedLoad
from repro.config import Layout
from repro.config.systems import load_system_file
from repro.config.timing import UNALIGNED_MATMUL
from repro.launch import local_launch
from repro.launch.job import Interrupt, Job
from repro.parallel import mesh as meshes
from tests.clock import Clock
from tests.training import tiny

MAX_MHZ, LOADED_MHZ = 1980.0, 1500.0
ALIGNED, UNALIGNED = 742e12, 130e12
"""Rates of the fake GPU's products, in FLOP/s."""


class Gpu:
    """A GPU whose clock rate falls from 1,980 to 1,500 MHz within the first second of load, and rises when idle."""

    def __init__(self, time: Clock, has_nvml: bool = True) -> None:
        self.time, self.has_nvml = time, has_nvml
        self.loaded_s = 0.0
        self.load = SustainedLoad(self.product, lambda: None, self.state)

    def product(self) -> None:
        self.time.now += 1e-3
        self.loaded_s += 1e-3

    def state(self) -> dict[str, float]:
        if not self.has_nvml:
            return {}
        mhz = MAX_MHZ - (MAX_MHZ - LOADED_MHZ) * min(1.0, self.loaded_s)
        return {"sm_mhz": mhz, "power_w": 700.0}


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().rules(monkeypatch, clock_module)


def test_the_load_lasts_until_the_clock_rate_has_settled(time: Clock) -> None:
    gpu = Gpu(time)
    gpu.load.settle()
    assert gpu.state()["sm_mhz"] == LOADED_MHZ
    assert gpu.loaded_s < clock_module.MAX_SETTLE_S
    gpu.load.record()
    gpu.loaded_s = 0.5
    gpu.load.record()  # too early for another record
    assert gpu.load.medians() == {"sm_mhz": LOADED_MHZ, "power_w": 700.0}
    time.now += clock_module.RECORD_INTERVAL_S
    gpu.load.record()
    assert gpu.load.medians()["sm_mhz"] == (LOADED_MHZ + gpu.state()["sm_mhz"]) / 2


def test_only_an_idle_device_is_loaded_again(time: Clock) -> None:
    gpu = Gpu(time)
    gpu.load.settle()
    before = gpu.loaded_s
    gpu.load.settle()
    assert gpu.loaded_s - before == pytest.approx(clock_module.WARM_S)
    gpu.loaded_s = 0.0  # the device was idle
    gpu.load.settle()
    assert gpu.state()["sm_mhz"] == pytest.approx(LOADED_MHZ, rel=clock_module.MAX_CLOCK_DIFFERENCE)
    # The load of a calibration is bounded, also if the clock rate of the device never settles again.
    for repeat in range(1000):
        gpu.loaded_s = -1e9 * (repeat % 2)
        gpu.load.settle()
    assert time.now - 100 < clock_module.MAX_LOAD_S + 2 * clock_module.MAX_REWARM_S


def test_without_nvml_the_load_has_a_fixed_duration(time: Clock) -> None:
    gpu = Gpu(time, has_nvml=False)
    before = gpu.loaded_s
    gpu.load.settle()
    assert gpu.loaded_s - before == pytest.approx(clock_module.MIN_SETTLE_S, abs=clock_module.SAMPLE_S)
    before = gpu.loaded_s
    gpu.load.settle()
    assert gpu.loaded_s == before
    gpu.load.record()
    assert gpu.load.medians() == {}


def test_repeat_runs_under_load_and_records_clock_rate(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products precede the calls, whose seconds do not contain them."""
    clock = OperatorClock(torch.device("cpu"), meshes.single_rank_mesh().world, repeats=3)
    gpu = Gpu(time)
    order: list[str] = []

    def event() -> Any:
        marked = SimpleNamespace(at=0.0, query=lambda: False, synchronize=lambda: None)
        marked.record = lambda: setattr(marked, "at", time.now)
        marked.elapsed_time = lambda later: 1e3 * (later.at - marked.at)
        return marked

    def hold(seconds: float) -> None:
        order.append("load")
        gpu.load.hold(seconds)

    def call() -> None:
        order.append("call")
        time.now += 3e-3

    clock.load = gpu.load
    clock._device_clock = clock_module.DeviceClock(event, clock.flush, hold)
    assert clock.time(lambda: call, 1 << 40).median == pytest.approx(3e-3)
    assert order[-6:] == ["load", "call"] * 3
    assert gpu.load.medians()["power_w"] == 700.0


def rank_result(
    *, copy: dict[str, float], nvlink: bool = False, per_node: int = 1, **measured: Any
) -> dict[str, Any]:
    """Return the result of a rank of a calibration on GPUs, with its measurements."""
    gpu = {"name": "NVIDIA Test", "compute_capability": "9.0", "memory_bytes": 10**11, "driver": "1"}
    gpu |= {"power_limit_w": 700.0, "max_sm_mhz": 1980}
    machine = {"gpus": [gpu], "memory": {"total_bytes": 10**11}, "versions": {"torch": "2.11.0"}}
    sizes = {"per_node": per_node, "threads": 1, "cache_bytes": 2**25, "context_bytes": 10**9}
    state = {"sm_mhz": LOADED_MHZ, "power_w": 690.0}
    copies = {"copy": copy, "host_copy": copy}
    return {"machine": {**machine, "nvlink": nvlink}, "gpu_state": state, **sizes, **copies, **measured}


def fake_rank(monkeypatch: pytest.MonkeyPatch, quick: bool) -> dict[str, Any]:
    """Return the result of a rank on a fake GPU; the calls of the planned steps are not executed."""

    def bound(call: Any, device: torch.device, generator: object) -> Any:
        rate = UNALIGNED if call.is_unaligned_product else ALIGNED
        return 1e-6 + call.operator.flops / rate + call.nbytes / 4e12

    def timed(make: Any, nbytes: int) -> OperatorTiming:
        return OperatorTiming(make(), make(), make(), 3)

    monkeypatch.setattr(target, "bind", bound)
    monkeypatch.setattr(target.torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda n: None))
    clock = SimpleNamespace(device=torch.device("cuda"), time=timed)
    experiments = plan.step_experiments("local-gpu", 1, "bf16", quick)
    rows = target.operators(experiments, clock, quick, lambda: None, lambda: None)  # type: ignore[arg-type]
    launch = {"operators": [("aten.add", 8, 0)] * 10, "median": 0.7e-3}
    launch |= {"backward_operators": 4, "backward_s": 0.4e-3}
    return rank_result(operators=rows, launch=launch, copy={"nbytes": 4 * 10**9, "median": 1e-3})


def test_an_unaligned_vocabulary_adds_only_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other operators have the sizes of the steps with an aligned vocabulary."""
    rows = fake_rank(monkeypatch, quick=False)["operators"]
    unaligned = [row for row in rows if row["is_unaligned"]]
    assert {row["name"] for row in unaligned} == {"aten.mm"}
    assert all({2049, 50257} & {size for shape in row["shapes"] for size in shape} for row in unaligned)
    losses = {row["nbytes"] for row in rows if row["name"] == "repro.cross_entropy_max"}
    assert all(nbytes % 8 == 0 for nbytes in losses)


@pytest.mark.parametrize("options", [["--quick"], []], ids=["quick", "full"])
def test_gpu_file_has_rates_of_unaligned_products(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine has one GPU, whose rank returns the results of the planned steps.

    Unaligned products are a separate class, and the file has the host's launch time for both passes.
    """

    def measure(self: LocalMachine, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        heads = {e.model.hidden // e.model.heads for e in job.experiments}
        assert heads == {plan.GPU_HEAD}
        return {"outcome": "ok", "results": [fake_rank(monkeypatch, bool(options))], "load": 0.0}

    monkeypatch.setattr(local_launch, "count_cuda_devices", lambda: 1)
    monkeypatch.setattr(calibration, "discover", lambda: SimpleNamespace(best_precision="bf16"))
    monkeypatch.setattr(LocalMachine, "measure", measure)
    path = tmp_path / "gpu.toml"
    status = cli.main(["calibrate", "--system", "local-gpu", "--output", str(path), *options])
    assert (status, capsys.readouterr().err) == (0, "")
    system = load_system_file(path)
    device, operators = system.device, system.device.operators
    assert device.name == "NVIDIA Test"
    assert 1 / operators[UNALIGNED_MATMUL].per_flop_s == pytest.approx(UNALIGNED, rel=0.1)
    assert 1 / operators["matmul"].per_flop_s == pytest.approx(ALIGNED, rel=0.01)
    assert not {"aten.mm", "aten.addmm", "aten.bmm"} & set(operators), "all as fast as matmul"
    assert UNALIGNED < (device.peak_flops["bf16"].value or 0) < ALIGNED
    assert device.time.launch_s.value == pytest.approx(0.3e-3 / 6)
    assert device.time.backward_launch_s.value == pytest.approx(0.1e-3)
    assert system.provenance is not None
    facts = system.provenance.facts
    assert (facts["sm_mhz"], facts["power_w"]) == (LOADED_MHZ, 690.0)


def test_launch_benchmark_times_the_backward_pass_separately() -> None:
    clock = OperatorClock(torch.device("cpu"), meshes.single_rank_mesh().world, repeats=1)
    launch = target.LaunchBench(clock, tiny(Layout()))
    for _ in range(3):
        launch.sample()
    found = launch.result()
    assert 0 < found["backward_s"] < found["high"]
    assert 0 < found["backward_operators"] < len(found["operators"])
