"""Steps of `repro gpu-day`: the commands of `steps.toml` for this machine, and the suites that the steps run."""

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
"""Command line that runs `repro` in this Python interpreter, without an installed script."""
TEST_WORKERS = 12
"""Maximum number of pytest processes that share one GPU. Each process needs about 1 GB for its CUDA context."""
CUDA_TOOLS = "/usr/local/cuda/bin"
"""Folder in which compute-sanitizer is searched if PATH does not contain it."""
STORE = "results"
"""Name of the record store's folder in the scratch folder, where all steps run; it is the default of `repro fit`."""
REHEARSAL_LIMIT_S = 300.0
REHEARSAL_ESTIMATE_S = 5.0
REHEARSAL_BASIS = "rehearsal on one small machine"


@dataclass(frozen=True)
class GpuDayStep:
    """One step of `repro gpu-day`: a process that measures or tests, with a time limit."""

    name: str
    question: str
    """Quantity or property that the `repro gpu-day` step measures or tests, as a noun phrase."""
    command: tuple[str, ...]
    estimate_s: float
    """Expected duration of the `repro gpu-day` step in seconds. The step is skipped if less time remains."""
    basis: str
    """Measurement or assumption from which the expected duration of a `repro gpu-day` step follows."""
    limit_s: float
    """Time in seconds after which the runner of `repro gpu-day` ends the step's process."""
    missing: str = ""
    """Requirement of a `repro gpu-day` step that this machine lacks, so the step is skipped; empty if all are met."""
    needs_file: str = ""
    """Name of an earlier `repro gpu-day` step's result file that this step reads; empty if it reads no result file."""
    environment: tuple[tuple[str, str], ...] = ()
    """Additional environment variables of the process of this `repro gpu-day` step, as pairs (name, value)."""
    in_checkout: bool = False
    """Whether the `repro gpu-day` step runs in the folder of the source code instead of the scratch folder."""


@dataclass(frozen=True)
class GpuDayPlaces:
    """Folders and suite files of one run of `repro gpu-day`."""

    out: Path
    """Folder of the result files of `repro gpu-day`."""
    scratch: Path
    """Folder of the record store, caches and suites of all steps, deleted at the end of `repro gpu-day`."""

    @property
    def store(self) -> Path:
        """Return the folder of the record store to which steps write; its records are copied to the result files."""
        return self.scratch / STORE

    @property
    def suite(self) -> Path:
        """Return the path of the suite `gpu_day`, whose models are tiny in a rehearsal."""
        return self.scratch / "gpu_day.toml"

    @property
    def smoke(self) -> Path:
        """Return the path of the suite of quick experiments (`smoke`), set to run on the devices of this machine."""
        return self.scratch / "gpu_smoke.toml"


def gpu_day_steps(places: GpuDayPlaces, *, rehearse: bool = False) -> list[GpuDayStep]:
    """Return all steps of `repro gpu-day` in the order of `steps.toml`; with `rehearse`, for tiny models on a CPU."""
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
        if rehearse:
            step = replace(
                step,
                estimate_s=min(REHEARSAL_ESTIMATE_S, step.estimate_s),
                limit_s=REHEARSAL_LIMIT_S,
                basis=REHEARSAL_BASIS,
                environment=(*step.environment, ("OMP_NUM_THREADS", "1")),
            )
        steps.append(step)
    return steps


def _missing(table: dict[str, Any], rehearse: bool) -> str:
    """Return the first requirement of a step (`table` of `steps.toml`) that this machine lacks, or an empty text."""
    needs = table.get("needs", [])
    if rehearse and not table.get("rehearsed", True):
        return str(needs[0])
    for need in needs if rehearse else [*needs, *table.get("gpu_needs", [])]:
        if need == "the tests of a source checkout or an installation kit":
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
    """Return the path of NVIDIA's compute-sanitizer; empty if the program is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_TOOLS) or ""


def write_suites(places: GpuDayPlaces, *, rehearse: bool) -> None:
    """Write the suites that steps run to the scratch folder. With `rehearse`, the suites' names end in `_rehearsal`."""
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
    """Return the TOML text of a suite after replacing its models by tiny models on processor cores."""
    tiny = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "system": "local"}
    lines = []
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if equals and key in tiny:
            line = f"{key} = {json.dumps(tiny[key])}"
        elif key == "vocab":
            # Models of different vocabulary sizes must still differ after the reduction to tiny models.
            line = f"vocab = {int(value) % 1000}"
        lines.append(line)
    return "\n".join(lines) + "\n"
