"""The steps of `repro gpu-day`, which `steps.toml` lists, on this machine, and the suites that they run."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro.config.files import read_toml
from repro.config.suites import SUITES
from repro.launch.local_launch import count_cuda_devices
from repro.util.extras import is_installed
from repro.util.processes import usable_cores

CHECKOUT = Path(__file__).parents[3]
STEPS_FILE = Path(__file__).with_suffix(".toml")
REPRO = (sys.executable, "-c", "from repro.cli import main; raise SystemExit(main())")
"""The `repro` command without an installed script."""
TEST_WORKERS = 12
"""Test processes that share one GPU. Each takes about 1 GB for its context."""
CUDA_TOOLS = "/usr/local/cuda/bin"
"""Folder of CUDA's tools where PATH lacks it."""
STORE = "results"
"""Name of the store in the scratch folder, which is the working directory. `repro fit` uses the same name."""
REHEARSAL_LIMIT_S = 120.0
REHEARSAL_ESTIMATE_S = 5.0
REHEARSAL_BASIS = "rehearsal on one small machine"


@dataclass(frozen=True)
class GpuDayStep:
    """One step: a process with its own time limit."""

    name: str
    question: str
    """The question that the step answers, as a noun phrase."""
    command: tuple[str, ...]
    estimate_s: float
    """Expected time in seconds. The step is skipped when less time remains."""
    basis: str
    """Measurement or assumption behind the estimate."""
    limit_s: float
    """Time after which the process is ended, in seconds."""
    missing: str = ""
    """Requirement that this machine lacks, which skips the step; empty for none."""
    needs_file: str = ""
    """Result file of a previous step that the step reads; empty for none."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables of this step, in addition to the variables of all steps."""
    in_checkout: bool = False
    """Whether the step runs in the folder of the source, else in the scratch folder."""


@dataclass(frozen=True)
class GpuDayPlaces:
    """Folders of one visit."""

    out: Path
    """Result files."""
    scratch: Path
    """Stores, caches and derived suites, which are deleted at the end."""

    @property
    def store(self) -> Path:
        """Store of the steps, whose records are copied to the result files."""
        return self.scratch / STORE

    @property
    def suite(self) -> Path:
        """The suite of the visit; in a rehearsal with tiny sizes."""
        return self.scratch / "gpu_day.toml"

    @property
    def smoke(self) -> Path:
        """The smoke suite on the GPUs of this machine."""
        return self.scratch / "gpu_smoke.toml"


def gpu_day_steps(places: GpuDayPlaces, *, rehearse: bool = False) -> list[GpuDayStep]:
    """Return all steps in order of value; in a rehearsal with tiny sizes on processors."""
    workers = min(TEST_WORKERS, max(1, usable_cores() - 2))
    words = {
        "{repro}": REPRO,
        "{python}": (sys.executable,),
        "{pytest}": (sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider"),
        "{parallel}": ("-n", str(workers)) if is_installed("xdist") else (),
        "{sanitizer}": (_sanitizer(),),
    }
    names = {name: getattr(places, name) for name in ("out", "store", "suite", "smoke")}
    steps = []
    for table in read_toml(STEPS_FILE)["step"]:
        missing = _missing(table, rehearse)
        rehearsal = table.pop("rehearsal", table["command"])
        text = rehearsal if rehearse else table["command"]
        command = [word for quoted in shlex.split(text) for word in words.get(quoted, (quoted,))]
        environment = table.pop("environment", {})
        settings = {
            "command": tuple(word.format(**names) for word in command),
            "environment": tuple((name, value.format(**names)) for name, value in environment.items()),
            "missing": missing,
        }
        own = {key: value for key, value in table.items() if key not in ("needs", "gpu_needs", "rehearsed")}
        step = GpuDayStep(**{**own, **settings})
        steps.append(_tiny(step) if rehearse else step)
    return steps


def _tiny(step: GpuDayStep) -> GpuDayStep:
    """Return a step with the times of a rehearsal."""
    return replace(
        step,
        estimate_s=min(REHEARSAL_ESTIMATE_S, step.estimate_s),
        limit_s=REHEARSAL_LIMIT_S,
        basis=REHEARSAL_BASIS,
        environment=(*step.environment, ("OMP_NUM_THREADS", "1")),
    )


def _missing(table: dict[str, Any], rehearse: bool) -> str:
    """Return the first requirement of a step that this machine lacks; empty for none."""
    needs = table.get("needs", [])
    if rehearse and not table.get("rehearsed", True):
        return str(needs[0])
    for need in needs if rehearse else [*needs, *table.get("gpu_needs", [])]:
        if need == "the tests of a checkout or a kit":
            has_it = (CHECKOUT / "tests" / "gpu").is_dir()
        elif need == "compute-sanitizer":
            has_it = bool(_sanitizer())
        elif need.endswith(" GPUs"):
            has_it = count_cuda_devices() >= int(need.split()[0])
        else:
            has_it = is_installed(need.replace("-", "_"))
        if not has_it:
            return str(need)
    return ""


def _sanitizer() -> str:
    """Return the path of compute-sanitizer; empty without it."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_TOOLS) or ""


def write_suites(places: GpuDayPlaces, *, rehearse: bool) -> None:
    """Write the suites of a visit to the scratch folder. The suites of a rehearsal have names of their own."""
    system, ending = ("local", "_rehearsal") if rehearse else ("local-gpu", "")
    for packaged, path in (("gpu_day", places.suite), ("smoke", places.smoke)):
        text = SUITES.find(Path(packaged)).read_text(encoding="utf-8")
        text = text.replace(f'name = "{packaged}"', f'name = "{path.stem}{ending}"', 1)
        if packaged == "smoke":
            text = text.replace("[defaults]\n", f'[defaults]\nsystem = "{system}"\n', 1)
        elif rehearse:
            text = _with_tiny_sizes(text)
        path.write_text(text, encoding="utf-8")


def _with_tiny_sizes(text: str) -> str:
    """Return the suite with tiny models on processors."""
    tiny = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "system": "local"}
    lines = []
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if equals and key in tiny:
            line = f"{key} = {json.dumps(tiny[key])}"
        elif key == "vocab":
            line = f"vocab = {int(value) % 1000}"  # different vocabularies remain different
        lines.append(line)
    return "\n".join(lines) + "\n"
