"""Provenance of a measurement: version of the source, packages, machine and environment, without importing torch.

Unavailable values are `None` or absent.  Names of users, hosts and directories are omitted; a hash of the host's name
shows whether two records come from one machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from repro import __version__
from repro.util.processes import usable_cores

PACKAGES = (
    *(
        "repro",
        "torch",
        "numpy",
        "scipy",
        "pandas",
        "pydantic",
        "submitit",
        "psutil",
        "nvidia-ml-py",
        "tokenizers",
    ),
    *("triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc-cu12", "cuda-bindings"),
    *("deepspeed", "megatron-core", "transformers"),
)
"""Names of the Python distributions whose versions a record contains if they are installed."""
ENVIRONMENT = re.compile(
    r"^(OMP|KMP|MKL|OPENBLAS|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|NVIDIA|SLURM|UCX|TP)_|^PYTHONHASHSEED$"
)
"""Pattern for the names of environment variables that may change measurements."""
_PRIVATE = re.compile(
    r"TOKEN|SECRET|PASSW|JWT|_KEY|KEY_|CREDENTIAL|USER|UID|GID|ACCOUNT|HOST|NODELIST|NODENAME|ADDR|_DIR|HOME|PATH|_FILE|COMMENT"
)
_GIT_TIMEOUT_S = 10.0
KIT_FILE = "kit.json"
"""Name of the file that describes Python, packages and git state of an offline installation kit (`make gpu-kit`)."""
_LARGEST_HASHED_BYTES = 1_000_000


def provenance() -> dict[str, Any]:
    """Return the provenance of a record as JSON data: sizes in bytes, clocks in MHz, power in W."""
    return {
        "git": git_state(Path(__file__).resolve().parents[2]),
        "packages": versions(),
        "torch": torch_build(),
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "os": {
            "system": platform.system(),
            "release": platform.release(),
            "libc": " ".join(platform.libc_ver()).strip(),
        },
        "cpu": cpu(),
        "memory": host_memory(),
        "gpus": gpus(),
        "environment": environment(),
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:12],
    }


def program_version() -> str:
    """Return `repro VERSION at COMMIT`, with `, changed` if files of the checkout differ from the commit."""
    state = git_state(Path(__file__).resolve().parents[2])
    if state is None or state["commit"] is None:
        return f"repro {__version__}"
    return f"repro {__version__} at {state['commit'][:9]}{', changed' if state['dirty'] else ''}"


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the git state of a checkout: the commit, whether files differ (`dirty`), and a hash of the changes.

    Untracked files count as changes.  An offline installation kit, which is no checkout, has this state in `kit.json`.
    Return `None` for an installed package, or without git.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        return dict(json.loads((root / KIT_FILE).read_text(encoding="utf-8"))["git"])

    def git(*arguments: str) -> bytes | None:
        # A query of the git state must not start a daemon (fsmonitor) or disturb a commit (optional locks).
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_GIT_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top).strip()).resolve() != root.resolve():
        return None
    head = git("rev-parse", "HEAD")
    commit = head.decode().strip() if head else None
    changes = git("diff", "--no-ext-diff", "--binary", "HEAD") if commit else b""
    untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    if changes is None or untracked is None:
        return {"commit": commit, "dirty": None, "diff": None}
    digest = hashlib.sha256(changes)
    names = sorted(name for name in untracked.split(b"\0") if name)
    for name in names:
        digest.update(name)
        digest.update(_content(root / os.fsdecode(name)))
    dirty = bool(changes or names)
    return {"commit": commit, "dirty": dirty, "diff": digest.hexdigest()[:16] if dirty else None}


def _content(path: Path) -> bytes:
    """Return a small file's contents, or the size of a large file, as input of a hash; empty if unreadable."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        return path.read_bytes() if size <= _LARGEST_HASHED_BYTES and path.is_file() else str(size).encode()
    return b""


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of those distributions in `names` that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def major_minor(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version, (2, 6) for `2.6.0+cu126`; empty for a version without numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else ()


def torch_build() -> dict[str, str | None]:
    """Return CUDA and HIP version and git commit of the torch build, from `torch/version.py`; empty if unknown."""
    build: dict[str, str | None] = {}
    with contextlib.suppress(ImportError, OSError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec and spec.origin:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            for key, name in (("cuda", "cuda"), ("hip", "hip"), ("git", "git_version")):
                match = re.search(rf"^{name}\b[^=\n]*=\s*(?:None|'([^']*)'|\"([^\"]*)\")", text, re.MULTILINE)
                if match:
                    build[key] = match[1] or match[2]
    return build


def cpu() -> dict[str, Any]:
    """Return the processor's model, cores (physical, logical, usable by this process), clocks (MHz) and load."""
    import psutil

    info = _cpuinfo(Path("/proc/cpuinfo"))
    clock = None
    with contextlib.suppress(OSError, NotImplementedError, AttributeError):
        clock = psutil.cpu_freq()
    policy = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    intel_no_turbo = _read(Path("/sys/devices/system/cpu/intel_pstate/no_turbo"))
    boost = _read(Path("/sys/devices/system/cpu/cpufreq/boost"))
    flags = set(info.get("flags", info.get("Features", "")).split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "quota_cores": _cgroup_quota(),
        "mhz": round(clock.current) if clock else None,
        "max_mhz": round(clock.max) if clock and clock.max else None,
        "governor": _read(policy / "scaling_governor"),
        "turbo": intel_no_turbo == "0"
        if intel_no_turbo is not None
        else (boost == "1" if boost is not None else None),
        "virtual": "hypervisor" in flags,
        "features": [name for name in wanted if name in flags],
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpuinfo(path: Path) -> dict[str, str]:
    """Return the fields that `/proc/cpuinfo` reports for the first processor."""
    fields: dict[str, str] = {}
    for line in (_read(path) or "").splitlines():
        key, colon, value = line.partition(":")
        if not colon and fields:
            break
        fields[key.strip()] = value.strip()
    return fields


def _cgroup_quota() -> float | None:
    """Return the CPU quota of a container in cores (cgroup v2); None without a limit."""
    quota, _, period = (_read(Path("/sys/fs/cgroup/cpu.max")) or "").partition(" ")
    return round(int(quota) / int(period), 2) if quota.isdigit() and period.isdigit() else None


def host_memory() -> dict[str, Any]:
    """Return the machine's memory, available memory, swap, and memory limit of a container (or None), in bytes."""
    import psutil

    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    state = psutil.virtual_memory()
    return {
        "total_bytes": state.total,
        "available_bytes": state.available,
        "limit_bytes": int(limit) if limit and limit.isdigit() else None,
        "swap_bytes": psutil.swap_memory().total,
    }


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the initialised `pynvml` module, or `None` without an NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # NVML fails if its library, the driver or a permission is missing.
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[dict[str, Any]]:
    """Return the properties of every NVIDIA GPU; a value that the driver does not report (MIG, old cards) is `None`."""
    with nvml() as n:
        return [_gpu(n, n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())] if n else []


def count_nvlinks(n: Any, handle: Any) -> int:
    """Return the number of a GPU's active NVLinks. A query of a link that the GPU lacks raises an error."""
    count = 0
    for link in range(n.NVML_NVLINK_MAX_LINKS):
        try:
            count += n.nvmlDeviceGetNvLinkState(handle, link) == n.NVML_FEATURE_ENABLED
        except n.NVMLError:
            break
    return count


def _gpu(n: Any, handle: Any) -> dict[str, Any]:
    def ask(query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = query(*arguments)
        except n.NVMLError:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    memory_info = ask(n.nvmlDeviceGetMemoryInfo, handle)
    capability = ask(n.nvmlDeviceGetCudaComputeCapability, handle)
    limit = ask(n.nvmlDeviceGetPowerManagementLimit, handle)
    ecc = ask(n.nvmlDeviceGetEccMode, handle)
    mig = ask(n.nvmlDeviceGetMigMode, handle)
    return {
        "name": ask(n.nvmlDeviceGetName, handle),
        "driver": ask(n.nvmlSystemGetDriverVersion),
        "compute_capability": ".".join(map(str, capability)) if capability else None,
        "memory_bytes": memory_info.total if memory_info else None,
        "memory_used_bytes": memory_info.used if memory_info else None,
        "sm_mhz": ask(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_SM),
        "max_sm_mhz": ask(n.nvmlDeviceGetMaxClockInfo, handle, n.NVML_CLOCK_SM),
        "memory_mhz": ask(n.nvmlDeviceGetClockInfo, handle, n.NVML_CLOCK_MEM),
        "power_limit_w": limit / 1000 if limit else None,
        "temperature_c": ask(n.nvmlDeviceGetTemperature, handle, n.NVML_TEMPERATURE_GPU),
        "throttle_reasons": ask(n.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "ecc": bool(ecc[0]) if ecc else None,
        "mig": bool(mig[0]) if mig else None,
    }


def environment() -> dict[str, str]:
    """Return environment variables that may change a measurement, except names of users, hosts, paths and secrets."""
    return {k: v for k, v in sorted(os.environ.items()) if ENVIRONMENT.search(k) and not _PRIVATE.search(k)}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
