"""Tests of the memory tracker: its counts equal the live storages after every operator of a step of every engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from repro.config import Layout
from repro.config.enums import Category, Phase
from repro.engines import build_engine
from repro.measure.memory import AllocationHistory, MemoryTracker, _with_total
from repro.parallel import mesh as meshes
from repro.parallel import storage
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import micro_batches, smallest, tiny


class CheckedTracker(MemoryTracker):
    """Memory tracker that compares its counts with all live storages after each operator."""

    operators = 0

    def __torch_dispatch__(self, *call: Any, **named: Any) -> Any:
        out = super().__torch_dispatch__(*call, **named)
        self.operators += 1
        if out is not NotImplemented and not self._agrees():
            raise AssertionError(f"{call[0]}: {self._now} counted, {self.live()} live")
        return out

    def _agrees(self) -> bool:
        """Return whether counts equal live bytes; retry, because a gloo thread may free a buffer between readings."""
        for _ in range(3):
            if self._now == self.live():
                return True
            self._now = _with_total(dict(self._counted))
        return False


def track_steps(layout: Layout, engine: str) -> tuple[int, dict[str, int]]:
    """Return the number of operators of construction and two steps, and the peak bytes."""
    experiment = tiny(layout, smallest(layout), engine)
    mesh = meshes.distributed_mesh(layout, "cpu")
    tracker = CheckedTracker()
    with tracker:
        built = build_engine(experiment, mesh, torch.device("cpu"))
    for step in range(2):
        with tracker:
            built.step(
                micro_batches(experiment, mesh.dp.rank, step),
                lambda phase: (built.mark_states(), setattr(tracker, "phase", phase))[1],  # type: ignore[func-returns-value]
            )
            built.synchronize()
    assert torch.UntypedStorage.resize_.__qualname__ != "MemoryTracker.__enter__.<locals>.resize_"
    return tracker.operators, tracker.peak


BF16 = {"dp": 2, "micro_batch": 2, "precision": "bf16"}
CASES = [
    *(("native", {**BF16, "zero": zero}) for zero in (2, 3)),
    ("native", {"tp": 2, "micro_batch": 2, "recompute": True, "pa": True, "pa_cpu": True}),
    ("native", {"pp": 2, "micro_batch": 1, "global_batch": 4}),
    *(pytest.param("torch", {**BF16, "zero": z}, marks=needs("torch")) for z in (0, 1, 3)),
    *(pytest.param("deepspeed", {**BF16, "zero": z}, marks=needs("deepspeed")) for z in range(4)),
    *(pytest.param("megatron", {**BF16, "zero": z}, marks=needs("megatron")) for z in range(2)),
]


@pytest.mark.parametrize(("engine", "layout"), CASES)
def test_tracked_bytes_equal_live_bytes(two: RankPool, engine: str, layout: dict[str, Any]) -> None:
    for operators, peak in two.run(track_steps, Layout(**layout), engine):
        assert operators > 100
        assert peak["total"] > 0


def test_marked_resized_and_freed_storages_are_counted() -> None:
    """Storages may change between operators and outside the tracker's context."""
    with CheckedTracker() as tracker:
        one, two = torch.zeros(100), torch.zeros(10)
        storage.mark(one, Category.PARAMETERS)
        storage.release(one)
        two.add_(1)
    storage.restore(one)
    storage.mark(two, Category.GRADIENTS)
    with tracker:
        two.add_(1)
        assert (tracker.most[Category.PARAMETERS], tracker.most[Category.GRADIENTS]) == (400, 40)
        two.untyped_storage().resize_(1000)
        two.add_(1)
        assert tracker.most[Category.GRADIENTS] == tracker.peak[Category.GRADIENTS] == 1000
        del one
        two.resize_(500)
    assert (tracker.peak["total"], tracker.live()["total"]) == (2000, 2000)


def function_calls(live: int) -> int:
    """Return the number of function calls in 300 small operators while `live` tensors are alive."""
    called = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    with MemoryTracker():
        tensors = torch._foreach_add(torch.zeros(live).split(1), 1.0)  # separate storages
        tensors[0].add(1)  # the tracker registers all storages
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for tensor in tensors[:300]:
                tensor.add(1)
        finally:
            sys.setprofile(before)
    return called


def test_tracking_cost_does_not_depend_on_live_tensors() -> None:
    few, many = function_calls(300), function_calls(8000)
    assert few > 300
    assert many < 1.1 * few


def test_allocation_history_has_segments_and_free_blocks() -> None:
    def summary() -> tuple[int, int, int, list[tuple[str, int]]]:
        (segment,) = history.final_segments(0)
        blocks = [(block["state"], block["requested_size"]) for block in segment["blocks"]]
        return segment["address"], segment["total_size"], segment["allocated_size"], blocks

    history = AllocationHistory(lambda: "model.py:7")
    history.resize(1, 512, "grads", "aten.mm", "forward")
    history.resize(2, 1024, "params", "aten.mm", "forward")
    history.resize(1, 0, "grads", "aten.mm", "forward")
    assert summary() == (512, 1024, 1024, [("active_allocated", 1024)])
    history.segments = [[(512, 1024, 2), (1536, 256, None)]]
    assert summary() == (512, 1280, 1024, [("active_allocated", 1024), ("inactive", 0)])


def test_meta_and_fake_tensors_have_no_bytes() -> None:
    """`to_empty` allocates the memory of a `meta` model. DTensor tries operators on fake tensors."""
    with MemoryTracker() as tracker:
        model = torch.nn.Linear(10, 10, bias=False, device="meta")
        with FakeTensorMode():
            fake = torch.ones(1000) + 1
        assert fake.device.type == "cpu"
        assert tracker.live()["total"] == tracker.peak["total"] == 0
        model.to_empty(device="cpu")
        assert tracker.live()["total"] == tracker.peak["total"] == 400


def test_only_forward_pass_allocations_count_as_activations() -> None:
    """Unmarked tensors of other phases count as other, for example gradients of activations."""
    with MemoryTracker() as tracker:
        tensors = []
        for phase in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.IDLE, Phase.FORWARD):
            tracker.phase = phase
            tensors.append(torch.zeros(25))
        views = [tensor[10:] for tensor in tensors]
        live = tracker.live()
    assert (live["activations"], live["other"], live["total"]) == (200, 400, 600)
    assert len(views) == 6


TORCH = """
import sys, torch
from repro.measure.memory import MemoryTracker
with MemoryTracker():
    torch.ones(2).add_(torch.empty(2))
assert "torch._dynamo" not in sys.modules

from repro.config import models
from repro.config import Experiment, Layout
from repro.simulate.trace.roles import roles, trace

layout = Layout(tp=2, dp=2, zero=2, precision="fp16", recompute=True, micro_batch=1, global_batch=2)
experiment = Experiment(name="x", model=models.load_model("tiny-parity"), layout=layout)
(role,) = roles(experiment)
before = trace(experiment, role)
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo.disable(len) is not len, "the real one"
after = trace(experiment, role)
assert sys.modules["torch._dynamo"] is torch._dynamo
assert after.events == before.events
"""
RECORDS = """
import sys
from repro.config import systems
from repro.config import OperatorSet
from repro.simulate.record import simulation_facts
assert all(simulation_facts(systems.load_system_file("selene"), kernels).numbers for kernels in OperatorSet)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("code", [TORCH, RECORDS], ids=["torch", "records"])
def test_compiler_and_torch_are_not_imported(code: str) -> None:
    """The tracker and traces need no compiler, which loads slowly. The age check of records needs no torch."""
    subprocess.run([sys.executable, "-c", code], check=True)
