"""Tests of profiles: predicted memory and time in the formats of PyTorch, and the page docs/profiles.md."""

from __future__ import annotations

import io
import json
import pickle
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from repro import cli
from repro.config import Experiment, Layout, Model, systems
from repro.simulate.step import Simulation, simulate, write_snapshot
from tests.test_text import tables

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"
V100 = systems.load_system_file("dgx1-v100-16gb")
MODEL = Model(name="small", layers=4, hidden=512, heads=8, vocab=2048, seq=256)
LAYOUTS = {
    "one": Layout(micro_batch=2, global_batch=4, precision="fp16"),
    "zero 3": Layout(dp=4, zero=3, micro_batch=2, global_batch=16, precision="fp16", recompute=True),
    "checkpoints on the host": Layout(
        tp=2, pa=True, pa_cpu=True, recompute=True, micro_batch=2, global_batch=4, precision="fp16"
    ),
    "stages": Layout(pp=4, micro_batch=2, global_batch=16, precision="fp16"),
}


def simulate_layout(name: str, **options: Any) -> Simulation:
    experiment = Experiment(name=name, model=MODEL, layout=LAYOUTS[name], system=V100.name)
    return simulate(experiment, V100, **options)


def snapshot_of(path: Path, found: Simulation, *, expandable: bool) -> dict[str, Any]:
    """Write a snapshot in the folder `path` and return its content."""
    write_snapshot(path / "memory.pickle", found, expandable=expandable)
    return pickle.loads((path / "memory.pickle").read_bytes())


def peak_and_end(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the peak and the final sum of live allocations; a release must end a live allocation of its size."""
    live: dict[int, int] = {}
    peak = 0
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(live.values()))
    return peak, sum(live.values())


def peak_reserved_bytes(events: list[dict[str, Any]]) -> int:
    """Return the peak of the bytes that the driver maps."""
    mapped = peak = 0
    for event in events:
        if event["action"].startswith("segment_"):
            mapped += event["size"] * (1 if event["action"] in ("segment_alloc", "segment_map") else -1)
        peak = max(peak, mapped)
    return peak


@pytest.mark.parametrize(
    ("name", "expandable"),
    [("one", True), ("zero 3", False), ("checkpoints on the host", True), ("stages", False)],
)
def test_a_snapshot_has_the_peaks_of_the_simulation(name: str, expandable: bool, tmp_path: Path) -> None:
    found = simulate_layout(name, expandable=expandable)
    snapshot = snapshot_of(tmp_path, found, expandable=expandable)
    for device, (events, role) in enumerate(zip(snapshot["device_traces"], found.roles, strict=True)):
        peak, end = peak_and_end(events)
        assert peak == role.memory.peak_bytes
        assert peak_reserved_bytes(events) == role.replay.peak_reserved
        blocks = [b for s in snapshot["segments"] if s["device"] == device for b in s["blocks"]]
        assert sum(block["requested_size"] for block in blocks) == end
        frames = [event["frames"][0] for event in events if event["action"] == "alloc"]
        assert {"repro", "kernels"} >= {Path(f["filename"]).parts[0] for f in frames if f["line"]} != set()
        categories = Counter(event["category"] for event in events if event["action"] == "alloc")
        assert categories.keys() >= {"parameters", "gradients", "activations"}
        assert "host" not in categories
    # The functions of torch accept the snapshot.
    assert "kernels/" in _memory_viz.memory(snapshot, format_flamegraph=str) or snapshot["segments"]
    assert "cudaMalloc" in _memory_viz.trace(snapshot) or "segment_map" in _memory_viz.trace(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    assert "total_reserved" in _memory_viz.segsum(snapshot)


def test_a_snapshot_ends_with_the_request_that_does_not_fit(tmp_path: Path) -> None:
    found = simulate_layout("one", memory_limit=V100.context() + 100 * 2**20)
    error = found.roles[0].replay.out_of_memory
    snapshot = snapshot_of(tmp_path, found, expandable=False)
    (events,) = snapshot["device_traces"]
    assert (events[-1]["action"], events[-1]["size"]) == ("oom", error.requested)
    assert events[-1]["device_free"] == error.limit - error.reserved
    assert "OutOfMemoryError" in _memory_viz.trace(snapshot)


def test_a_snapshot_has_only_types_that_the_viewer_reads(tmp_path: Path) -> None:
    """MemoryViz.js reads pickle protocols 2 to 4, no objects, and only integers that a double represents exactly."""
    snapshot_of(tmp_path, simulate_layout("stages", expandable=True), expandable=True)
    data = (tmp_path / "memory.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} is an object")

    snapshot = PlainUnpickler(io.BytesIO(data)).load()
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert max(event["addr"] + event["size"] for event in events) < 2**53
    assert "unknown" in {event["category"] for event in events}, "annotate_snapshot needs this category"


def test_the_page_shows_the_files_of_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = {head[0]: body for head, body in tables(PAGE)}
    (command,) = re.findall(r"^    \$ repro (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    events = json.loads(Path("step.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    tracks = []
    for track in (event for event in events if event["name"] == "thread_name"):
        key = track["pid"], track["tid"]
        durations = [event["dur"] / 1e3 for event in kernels if (event["pid"], event["tid"]) == key]
        tracks.append([str(key[0]), track["args"]["name"], str(len(durations)), f"{sum(durations):.1f}"])
    assert table["stage"] == sorted(tracks)
    devices = [
        [str(number), str(sum(event["action"] == "alloc" for event in trace)), *map(str, peak_and_end(trace))]
        for number, trace in enumerate(pickle.loads(Path("memory.pickle").read_bytes())["device_traces"])
    ]
    assert table["device"] == devices
    names = re.findall(r"`((?:aten|repro|nccl):[\w:]+)`", "".join(row[1] for row in table["event"]))
    assert set(names) <= {event["name"] for event in kernels}
    (measured,) = re.findall(r"^    repro (run .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert cli.main([*shlex.split(measured), "--dry-run"]) == 0
