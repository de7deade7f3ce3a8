"""The steps of `repro gpu-day` as data: command, limit, estimated time and the basis of the estimate."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from repro.config.suites import SUITES
from repro.launch.gpu_day.result_files import FACTS, MEASUREMENTS, PROFILES, SNAPSHOT, SYSTEM
from repro.launch.local_launch import count_cuda_devices
from repro.util.extras import is_installed
from repro.util.processes import usable_cores

CHECKOUT = Path(__file__).parents[3]
REPRO = (sys.executable, "-c", "from repro.cli import main; raise SystemExit(main())")
"""The `repro` command without an installed script."""
PYTEST = (sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider")
WHOLE_ADDOPTS = "--override-ini=addopts=--import-mode=importlib --strict-markers"
"""Options of the benchmark, which the options of `pyproject.toml` skip."""
FIRST_VISIT, SECOND_VISIT = "first visit to a GPU (one H200)", "second visit (one H200)"
NOT_MEASURED = "not measured yet; two launches of 10 s over sockets"
TEST_WORKERS = 12
"""Test processes that share one GPU. Each takes about 1 GB for its context."""
CUDA_TOOLS = "/usr/local/cuda/bin"
"""Folder of CUDA's tools where PATH lacks it."""
SLOW_LINKS = (("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"))
"""NCCL's variables with which the GPUs of one machine exchange messages over sockets."""
MEMORY_LIMIT = "32GB"
RANKS_OF_LIMIT = 64
"""Ranks of the layout of which a memory trial is one."""
MICRO_BATCH_1_WAYS = ("graphs", "accumulated", "accumulated-graphs", "torch")
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
    steps = [
        *_check_steps(places, rehearse),
        *_speed_steps(places, rehearse),
        *_prediction_steps(places, rehearse),
        *_limit_steps(places, rehearse),
        *_remaining_steps(places, rehearse),
        *_several_gpu_steps(places, rehearse),
    ]
    return [_tiny(step) for step in steps] if rehearse else steps


def _tiny(step: GpuDayStep) -> GpuDayStep:
    """Return a step with the times of a rehearsal."""
    estimate = min(REHEARSAL_ESTIMATE_S, step.estimate_s)
    environment = (*step.environment, ("OMP_NUM_THREADS", "1"))
    step = replace(step, estimate_s=estimate, limit_s=REHEARSAL_LIMIT_S)
    return replace(step, basis=REHEARSAL_BASIS, environment=environment)


def _program(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", f"repro.launch.gpu_day.{name}", *map(str, arguments))


def _run(places: GpuDayPlaces, suite: Path, *names: str) -> tuple[str, ...]:
    only = (word for name in names for word in ("--only", name))
    return (*REPRO, "run", str(suite), *only, "--results", str(places.store))


def _missing_tests(package: str) -> str:
    """Return the missing requirement of tests with `package`; empty for none."""
    if not (CHECKOUT / "tests" / "gpu").is_dir():
        return "the tests of a checkout or a kit"
    return "" if is_installed(package.replace("-", "_")) else package


def _check_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield facts of the machine and the tests on it."""
    no_tests = _missing_tests("pytest")
    yield GpuDayStep(
        "facts",
        "machine, driver, packages and their places",
        _program("step_probe", "facts", places.out / FACTS),
        *(15, "import of torch from a cold disk", 60),
    )
    workers = min(TEST_WORKERS, max(1, usable_cores() - 2))
    parallel = ("-n", str(workers)) if is_installed("xdist") else ()
    marked = ("-m", "gpu and not benchmarks", "tests/gpu", "tests/kernels", "tests/engines")
    few = ("tests/kernels/test_operators.py", "-k", "layer_norm")
    yield GpuDayStep(
        "gpu-tests",
        "correctness of kernels and of the step on this GPU",
        (*PYTEST, *(few if rehearse else (*marked, *parallel))),
        *(35, f"{SECOND_VISIT}: 29 s with 12 workers", 110),
        missing=no_tests,
        in_checkout=True,
    )
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_TOOLS) or ""
    for tool, dtype in (("memcheck", "bf16"), ("racecheck", "fp32")):
        tests = ("tests/gpu/test_operators.py", "-k", f"values and {dtype}")
        checked = (*PYTEST, *(few if rehearse else tests))
        around: tuple[str, ...] = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
        # NVIDIA's Python bindings query functions that the driver lacks, which are errors of calls, not of kernels.
        around += ("--report-api-errors", "no") if tool == "memcheck" else ()
        yield GpuDayStep(
            tool,
            f"errors that compute-sanitizer's {tool} finds in the operators",
            checked if rehearse else (*around, *checked),
            *(20, f"{SECOND_VISIT}: 6 s, with the caching allocator", 75),
            missing=no_tests or ("" if rehearse or sanitizer else "compute-sanitizer"),
            environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
            in_checkout=True,
        )


def _speed_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield GPT-2 1.5B at micro-batch 8 and 1 by three implementations, and profiles of ours."""
    files = places.out / PROFILES, places.out / MEASUREMENTS
    yield GpuDayStep(
        "step-micro-batch-8",
        "step of GPT-2 1.5B with 8 samples: ours, captured as CUDA graphs, and torch's engine",
        _run(places, places.suite, "mb8", "mb8-graphs", "mb8-dropout-graphs", "mb8-torch"),
        *(40, f"{SECOND_VISIT}: 34 s", 130),
    )
    yield GpuDayStep(
        "step-micro-batch-1",
        "step of GPT-2 1.5B with 1 sample: ours, captured as CUDA graphs, and torch's engine",
        _run(places, places.suite, "mb1", *(f"mb1-{way}" for way in MICRO_BATCH_1_WAYS)),
        *(45, f"{SECOND_VISIT}: 38 s", 150),
    )
    yield GpuDayStep(
        "plain-module",
        "the same step of a plain module under torch.compile",
        _program("torch_modules", "plain", places.out / MEASUREMENTS, *(["--tiny"] if rehearse else [])),
        *(50, f"{SECOND_VISIT}: 46 s", 100),
    )
    yield GpuDayStep(
        "profile",
        "host and device time of a step, and its kernels",
        _program("step_probe", "profile", places.suite, *files, "mb1", "mb8"),
        *(25, f"{FIRST_VISIT}: two builds of the model and ten steps", 80),
    )


def _prediction_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield the calibration, and predicted against measured steps."""
    system = places.out / SYSTEM
    on = ("--quick", "--system", "local", "--gpus", "1") if rehearse else ("--system", "local-gpu")
    yield GpuDayStep(
        "calibrate",
        "rates of this machine as a system file",
        (*REPRO, "calibrate", *on, "--output", str(system)),
        *(50, f"{SECOND_VISIT}: 44 s on one GPU", 150),
    )
    yield GpuDayStep(
        "validate",
        "predicted against measured steps",
        (*REPRO, "validate", "--system", str(system), "--results", str(places.store)),
        *(20, "traces of a few steps on the host's processors", 60),
        needs_file=SYSTEM,
    )


def _limit_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield the largest models in 32 GB under each strategy, as one rank of many."""
    basis = f"{SECOND_VISIT}: 16 s for plain dp, 46 and 60 s for ZeRO 2"
    tp, ranks = (2, 4) if rehearse else (16, RANKS_OF_LIMIT)
    strategies: dict[str, tuple[list[str], int]] = {
        "plain-dp": (["--zero", "0", "--no-cb"], 1600),
        "zero-1": (["--zero", "1"], 3072),
        "zero-2": (["--zero", "2"], 4096),
        "zero-3": (["--zero", "3"], 8192),
        "activations-on-host": (["--zero", "2", "--tp", str(tp), "--pa", "--pa-cpu"], 8192),
    }
    few_trials = {"zero-1": "660MB"}  # sizes at which the simulated guess is exact
    for name, (strategy, hidden) in strategies.items():
        system = ["--system", "local"] if rehearse else ["--system", "local-gpu"]
        tiny = ["--hidden", "1024", "--heads", "16", "--vocab", "1024", "--seq", "64", "--precision", "bf16"]
        heads = ["--heads", "25"] if hidden == 1600 else []
        sizes = tiny if rehearse else ["--hidden", str(hidden), *heads, "--precision", "fp16"]
        one = ["--gpus", "1", "--as-rank", "0", "--of", str(ranks)]
        batch = ["--micro-batch", "1", "--recompute"]
        limit = few_trials.get(name, "700MB") if rehearse else MEMORY_LIMIT
        options = (*system, *one, "--memory-limit", limit, *strategy, *sizes, *batch)
        yield GpuDayStep(
            f"limit-{name}",
            f"largest model in {MEMORY_LIMIT}: {name.replace('-', ' ')}, one rank of {ranks}",
            (*REPRO, "fit", "--measure", *options),
            *(45, basis, 110),
        )
    yield GpuDayStep(
        "limit-offload",
        "step with optimizer states in host memory",
        _run(places, places.suite, "offload"),
        *(35, f"{FIRST_VISIT}: 29 s without offload", 100),
        missing="" if is_installed("deepspeed") and not rehearse else "deepspeed",
    )


def _remaining_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield `repro.parallelize`, the kernel table, checkpoints, the allocator's history and further trainings."""
    tiny = ("--tiny",) if rehearse else ()
    files = places.out / SNAPSHOT, places.out / MEASUREMENTS
    yield GpuDayStep(
        "parallelize",
        "repro.parallelize on three models of transformers, stages 0 to 3, against plain torch",
        _program("torch_modules", "parallelize", places.out / MEASUREMENTS, *tiny),
        *(80, f"{SECOND_VISIT}: 78 s", 140),
        missing="" if is_installed("transformers") else "transformers",
    )
    few = ("-k", "residual and reference and float32") if rehearse else ()
    yield GpuDayStep(
        "kernel-table",
        "time of every kernel and of torch's operators",
        (*PYTEST, "tests/gpu/test_bandwidth.py", "-q", "--benchmark-only", WHOLE_ADDOPTS, *few),
        *(65, f"{SECOND_VISIT}: 63 s", 120),
        missing=_missing_tests("pytest-benchmark"),
        in_checkout=True,
        environment=(("KERNEL_RECORDS", str(places.store)),),
    )
    yield GpuDayStep(
        "checkpoint",
        "losses of a training that was resumed from a checkpoint",
        _run(places, places.suite, "undivided", "first-half", "second-half"),
        *(45, "three launches of 9 s and 13 GB of files", 120),
    )
    yield GpuDayStep(
        "memory-snapshot",
        "every allocation of one step",
        _program("step_probe", "snapshot", places.suite, *files, "mb8"),
        *(20, f"{FIRST_VISIT}: one build of the model and three steps", 60),
    )
    yield GpuDayStep(
        "other-operators",
        "step with torch's operators, and with a vocabulary of 50,257",
        _run(places, places.suite, "unaligned", "operators-of-torch"),
        *(20, f"{SECOND_VISIT}: 15 s", 80),
    )


def _several_gpu_steps(places: GpuDayPlaces, rehearse: bool) -> Iterator[GpuDayStep]:
    """Yield parity over NCCL and the low-bandwidth twin, for machines with two GPUs or more."""
    count = count_cuda_devices()
    missing = "" if count >= 2 or rehearse else "2 GPUs"
    names = ("parity-single", "parity-z2-dp2") if rehearse else ("parity-*", "states-*", "comm-*")
    yield GpuDayStep(
        "nccl-parity",
        "losses of every layout of the smoke suite over NCCL",
        _run(places, places.smoke, *names),
        *(90, "the smoke suite on processors: 60 s", 150),
        missing=missing,
    )
    yield GpuDayStep(
        "low-bandwidth-twin",
        "ratio of ZeRO to Megatron where links are slow, on real GPUs",
        _run(places, places.suite, "slow-links-*"),
        *(40, NOT_MEASURED, 100),
        missing=missing,
        environment=SLOW_LINKS,
    )


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
