"""Profiles: predicted memory and time in the formats of PyTorch, and the page about them."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from repro import cli
from repro.config import Experiment, Layout, Model, Training, systems
from repro.simulate.step import Simulation, simulate, write_snapshot

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"
MODEL = Model(name="small", layers=4, hidden=512, heads=8, vocab=2048, seq=256)
LAYOUTS = {
    "one": Layout(micro_batch=2, global_batch=4, precision="fp16"),
    "zero 3": Layout(dp=4, zero=3, micro_batch=2, global_batch=16, precision="fp16", recompute=True),
    "checkpoints on the host": Layout(
        tp=2, pa=True, pa_cpu=True, recompute=True, micro_batch=2, global_batch=4, precision="fp16"
    ),
    "stages": Layout(pp=4, micro_batch=2, global_batch=16, precision="fp16"),
}


def simulated(name: str, **options: Any) -> Simulation:
    experiment = Experiment(
        name=name, model=MODEL, layout=LAYOUTS[name], training=Training(), system="dgx1-v100-16gb"
    )
    return simulate(experiment, systems.load_system_file("dgx1-v100-16gb"), **options)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def peaks(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Peak and last sum of live allocations, each of which a release ends at most once."""
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


def reserved(events: list[dict[str, Any]]) -> int:
    """Peak of the driver's memory."""
    now = peak = 0
    for event in events:
        if event["action"].startswith("segment_"):
            now += event["size"] * (1 if event["action"] in ("segment_alloc", "segment_map") else -1)
        peak = max(peak, now)
    return peak


def accepted(snapshot: dict[str, Any]) -> str:
    """Pass a snapshot through the functions of torch, and return what they print about its segments."""
    assert "kernels/" in _memory_viz.memory(snapshot, format_flamegraph=str) or snapshot["segments"]
    assert "cudaMalloc" in _memory_viz.trace(snapshot) or "segment_map" in _memory_viz.trace(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    return _memory_viz.segsum(snapshot)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_snapshot_has_the_peaks_of_the_simulation(name: str, expandable: bool, tmp_path: Path) -> None:
    found = simulated(name, expandable=expandable)
    write_snapshot(tmp_path / "memory.pickle", found, expandable=expandable)
    snapshot = read(tmp_path / "memory.pickle")
    assert len(snapshot["device_traces"]) == len(found.roles)
    for device, (events, role) in enumerate(zip(snapshot["device_traces"], found.roles, strict=True)):
        peak, end = peaks(events)
        assert peak == role.memory.peak_bytes
        assert reserved(events) == role.replay.peak_reserved
        blocks = [b for s in snapshot["segments"] if s["device"] == device for b in s["blocks"]]
        assert sum(block["requested_size"] for block in blocks) == end
        frames = [event["frames"][0] for event in events if event["action"] == "alloc"]
        assert {"repro", "kernels"} >= {Path(f["filename"]).parts[0] for f in frames if f["line"]} != set()
        categories = Counter(event["category"] for event in events if event["action"] == "alloc")
        assert categories.keys() >= {"parameters", "gradients", "activations"}
        assert "host" not in categories
    assert "total_reserved" in accepted(snapshot)


def test_a_snapshot_ends_with_the_request_that_does_not_fit(tmp_path: Path) -> None:
    limit = systems.load_system_file("dgx1-v100-16gb").context() + 100 * 2**20
    found = simulated("one", memory_limit=limit)
    error = found.roles[0].replay.out_of_memory
    assert error is not None
    write_snapshot(tmp_path / "memory.pickle", found, expandable=False)
    (events,) = read(tmp_path / "memory.pickle")["device_traces"]
    assert (events[-1]["action"], events[-1]["size"]) == ("oom", error.requested)
    assert events[-1]["device_free"] == error.limit - error.reserved
    assert "OutOfMemoryError" in _memory_viz.trace(read(tmp_path / "memory.pickle"))


def test_the_viewer_can_read_the_file(tmp_path: Path) -> None:
    """MemoryViz.js reads protocols 2 to 4, no objects, and numbers that a double holds exactly."""
    write_snapshot(tmp_path / "memory.pickle", simulated("stages", expandable=True), expandable=True)
    data = (tmp_path / "memory.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} is an object")

    snapshot = Plain(io.BytesIO(data)).load()
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert max(event["addr"] + event["size"] for event in events) < 2**53
    assert "unknown" in {event["category"] for event in events}, "annotate_snapshot fails without it"


def table(head: str) -> list[list[str]]:
    """Rows of the page's table whose first heading is `head`."""
    text = PAGE.read_text(encoding="utf-8")
    (rows,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def test_the_page_shows_what_its_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^    \$ repro (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    events = json.loads(Path("step.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    tracks = []
    for track in (event for event in events if event["name"] == "thread_name"):
        at = track["pid"], track["tid"]
        own = [event["dur"] / 1e3 for event in kernels if (event["pid"], event["tid"]) == at]
        tracks.append([str(at[0]), track["args"]["name"], str(len(own)), f"{sum(own):.1f}"])
    assert table("stage") == sorted(tracks)
    devices = [
        [str(number), str(sum(event["action"] == "alloc" for event in trace)), *map(str, peaks(trace))]
        for number, trace in enumerate(read(Path("memory.pickle"))["device_traces"])
    ]
    assert table("device") == devices
    names = re.findall(r"`((?:aten|repro|nccl):[\w:]+)`", "".join(row[1] for row in table("event")))
    assert set(names) <= {event["name"] for event in kernels}
    (measured,) = re.findall(r"^    repro (run .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert cli.main([*shlex.split(measured), "--dry-run"]) == 0


def test_a_snapshot_opens_in_the_viewer_in_a_browser(tmp_path: Path) -> None:
    """torch has no MemoryViz.js and no d3: a folder that REPRO_MEMORY_VIEWER names has these files."""
    folder, browser = Path(os.environ.get("REPRO_MEMORY_VIEWER", "")), shutil.which("chromium")
    if not (folder / "MemoryViz.js").exists() or browser is None:
        pytest.skip("needs REPRO_MEMORY_VIEWER=DIR with MemoryViz.js and d3.js, and Chromium")
    from playwright.sync_api import Route, sync_playwright

    found = simulated("stages")
    write_snapshot(tmp_path / "memory.pickle", found, expandable=False)
    viewer = (folder / "MemoryViz.js").read_text(encoding="utf-8")
    names = {*re.findall(r"d3\.(\w+)", viewer), *re.findall(r"import \{([\w, ]+)\} from \"[^\"]*d3", viewer)}
    exports = ", ".join(sorted(", ".join(names).split(", ")))
    library = (
        f"{(folder / 'd3.js').read_text(encoding='utf-8')}\n;export const {{{exports}}} = globalThis.d3;"
    )

    def answer(route: Route) -> None:
        own = folder / Path(route.request.url).name
        body = own.read_text(encoding="utf-8") if own.exists() else library
        route.fulfill(body=body, content_type="text/javascript", headers={"Access-Control-Allow-Origin": "*"})

    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        (tmp_path / "memory.html").write_text(plot(read(tmp_path / "memory.pickle")), encoding="utf-8")
        with sync_playwright() as driver:
            opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
            page = opened.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))  # noqa: B023
            page.route(re.compile("^https:"), answer)
            page.goto((tmp_path / "memory.html").as_uri())
            page.wait_for_selector("svg", state="attached")
            page.wait_for_timeout(1000)
            assert errors == []
            drawn = page.locator("svg polygon, svg rect").count()
            assert drawn > 10
            assert page.locator("select").nth(2).locator("option").count() == len(found.roles)
            page.screenshot(path=os.environ.get("REPRO_SCREENSHOTS", str(tmp_path)) + f"/{plot.__name__}.png")
            opened.close()
