"""Programs of three `repro gpu-day` steps: machine description, and profile and memory snapshot of a training step.

python -m repro.launch.gpu_day.step_probe facts FACTS
python -m repro.launch.gpu_day.step_probe profile SUITE PROFILES MEASUREMENTS EXPERIMENT...
python -m repro.launch.gpu_day.step_probe snapshot SUITE SNAPSHOT MEASUREMENTS EXPERIMENT
"""

from __future__ import annotations

import gc
import gzip
import importlib
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from repro.config.suites import load_suite
from repro.launch.doctor.machine import command_output, unusable_reason
from repro.launch.gpu_day.result_files import MAX_FILE_BYTES, append_durably, append_measurement
from repro.launch.gpu_day.steps import CHECKOUT
from repro.launch.rank.experiment import ExperimentRun
from repro.measure.memory import MemoryTracker
from repro.measure.provenance import KIT_FILE, provenance
from repro.parallel import mesh as meshes
from repro.util.files import read_json, replace_file, write_json
from repro.util.processes import available_bytes, usable_cores

MODULES = ("repro", "repro.kernels", "pydantic", "scipy", "submitit", "pyroute2", "torch", "transformers")
"""Python modules whose file paths are recorded; the path shows if a module is from the offline installation kit."""
QUERY_TIMEOUT_S = 20.0
HOST_BOUND_RATIO = 1.1
"""Ratio of step time to GPU kernel time above which a training step counts as limited by the host."""
TIMED_STEPS = 3
TABLE_ROWS = 45
MAX_ALLOCATIONS = 200_000
MAX_FRAMES = 4
"""Maximum number of stack frames that a memory snapshot retains for each allocation."""


def write_facts(path: Path) -> None:
    """Write to a JSON file this machine's hardware, driver, Python modules with paths, and offline installation kit."""
    state = ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,TEMPERATURE,MEMORY"]
    found = {
        "provenance": provenance(),
        "kit": read_json(CHECKOUT / KIT_FILE) or None,
        "modules": {name: _place(name) for name in MODULES},
        "cores": usable_cores(),
        "available_bytes": available_bytes(),
        "gpu_unusable": unusable_reason(torch),
        "tools": {name: shutil.which(name) for name in ("compute-sanitizer", "nvcc", "gcc", "ncu", "nsys")},
        "nvidia_smi": command_output(state, QUERY_TIMEOUT_S),
        "topology": command_output(["nvidia-smi", "topo", "-m"], QUERY_TIMEOUT_S),
    }
    write_json(path, found)
    print(json.dumps(found["modules"], indent=1))


def _place(name: str) -> str:
    """Return the file path of the module `name`, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"not importable: {error}"
    return str(module.__file__ or next(iter(module.__path__), ""))


def start_run(suite: Path, name: str) -> ExperimentRun:
    """Start experiment `name` of a suite in this process, run its untimed steps, and return the running experiment."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experiment = load_suite(suite).entry(name).experiment
    mesh = meshes.single_rank_mesh()
    run = ExperimentRun(experiment, mesh, device, lambda step, phase: None, watched=False)
    run.prelude()
    return run


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time in seconds that kernel `intervals` (begin, end) cover; overlapping kernels count once."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def profile_steps(suite: Path, profiles: Path, measurements: Path, names: Sequence[str]) -> None:
    """Profile one training step of each experiment: step time, kernel time, and tables of kernels by time."""
    for name in names:
        run = start_run(suite, name)
        run.steps(min(TIMED_STEPS, run.left - 1))
        step_s = min(run.rounds[-1])
        on_gpu = run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as found:
            run.steps(1)
        kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
        device_s = busy_seconds((k.time_range.start / 1e6, k.time_range.end / 1e6) for k in kernels)
        is_host_bound = not on_gpu or step_s > HOST_BOUND_RATIO * device_s
        values = {
            "step_s": step_s,
            "device_s": device_s,
            "kernels": len(kernels),
            "host_bound": is_host_bound,
        }
        append_measurement(measurements, f"profile/{name}", **values)
        print(name, values, flush=True)
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        averages = found.key_averages()
        orders = [order, *(["self_cpu_time_total"] if on_gpu and is_host_bound else [])]
        for sort_by in orders:
            table = averages.table(sort_by=sort_by, row_limit=TABLE_ROWS, max_name_column_width=90)
            text = f"Profile of {name}, sorted by {sort_by}: {values}\n{table}\n\n"
            append_durably(profiles, text.encode())
        del run, found, kernels, averages
        gc.collect()


def snapshot_step(suite: Path, path: Path, measurements: Path, name: str) -> None:
    """Write all memory allocations and releases of one training step, and the peaks of the CUDA caching allocator."""
    run = start_run(suite, name)
    if run.device.type != "cuda":
        with MemoryTracker() as tracker:
            run.steps(1)
        stats: dict[str, Any] = {"tracked_peak_bytes": tracker.peak["total"]}
        document: dict[str, Any] = {"name": name, "stats": stats, "events": []}
    else:
        run.steps(1)
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")
        run.steps(1)
        found = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        every = torch.cuda.memory_stats().items()
        stats = {key: value for key, value in every if key.endswith(".all.peak") or key.startswith("num_")}
        facts = ("total_size", "allocated_size", "segment_type", "stream")
        segments = [{key: segment[key] for key in facts} for segment in found["segments"]]
        events = [_event(event) for event in found["device_traces"][0]]
        document = {"name": name, "stats": stats, "segments": segments, "events": events}
    data = gzip.compress(json.dumps(document).encode(), compresslevel=6)
    if len(data) > MAX_FILE_BYTES:
        document["events"] = [event[:3] for event in document["events"]]
        data = gzip.compress(json.dumps(document).encode(), compresslevel=9)
    replace_file(path, data)
    append_measurement(measurements, f"snapshot/{name}", events=len(document["events"]), **stats)
    print(name, stats, flush=True)


def _event(event: dict[str, Any]) -> list[Any]:
    """Return action, address and bytes of an allocator event, and its innermost stack frames in this package."""
    frames = [
        f"{Path(frame['filename']).name}:{frame['line']}"
        for frame in event.get("frames", ())
        if "repro" in frame["filename"]
    ]
    return [event["action"], event["addr"], event["size"], *frames[:MAX_FRAMES]]


if __name__ == "__main__":
    _kind, *_rest = sys.argv[1:]
    if _kind == "facts":
        write_facts(Path(_rest[0]))
    else:
        _suite, _target, _measurements = map(Path, _rest[:3])
        if _kind == "profile":
            profile_steps(_suite, _target, _measurements, _rest[3:])
        else:
            snapshot_step(_suite, _target, _measurements, _rest[3])
