"""Tests of a GPU day's rehearsal with only the kit: no network, a read-only kit, a failure, a hang and a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from repro.launch.gpu_day.result_files import FACTS, FILES, MAX_FILES, RECORDS, STEPS, read_json_lines
from tests.launch.runs import wait_for

PRESENT = ("torch", "numpy", "transformers")
"""Packages of the target, the value of PRESENT for `make gpu-kit`."""
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x1 | 0x40))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Program that starts the loopback interface (SIOCSIFFLAGS, IFF_UP | IFF_RUNNING) and then a command."""
END_TIMEOUT_S = 300
FAILING, HANGING = "step-micro-batch-1", "memcheck"
SKIPPED = "limit-offload"
"""Step that needs a library which neither the target nor the kit has."""


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the installed distributions that `names` require, themselves included."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            required = (line for line in requires if "extra ==" not in line)
            pending += [match[0] for line in required if (match := re.match(r"[\w.-]+", line))]
    return found


def make_target(folder: Path) -> Path:
    """Return the Python of a new environment in `folder` that has only `PRESENT` and their requirements."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name in closure(PRESENT):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source = Path(str(package.locate_file(top)))
            if not (packages / top).exists():
                (packages / top).symlink_to(source)
    return folder / "bin" / "python"


def offline_command(kit: Path, command: list[str]) -> list[str]:
    """Return `command` in a network namespace with only the loopback interface, with `kit` mounted read-only."""
    mounted = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    up = [sys.executable, "-c", LOOPBACK_UP, *command]
    return ["unshare", "--map-root-user", "--net", "--mount", "bash", "-c", mounted, str(kit), *up]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the kit of `make test-gpu-kit` and return its folder."""
    if not (packed := os.environ.get("REPRO_GPU_KIT")):
        pytest.skip("run by make test-gpu-kit")
    folder = tmp_path_factory.mktemp("kit")
    with tarfile.open(packed) as archive:
        archive.extractall(folder)
    return folder / "gpu-kit"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a target that has only torch, numpy and transformers."""
    return make_target(tmp_path_factory.mktemp("target"))


def start(kit: Path, target: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = ["/bin/bash", str(kit / "gpu" / "run.sh"), "--rehearse", "--out", str(out), *options]
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHON": str(target), "TMPDIR": str(out.parent)}
    return subprocess.Popen(
        offline_command(kit, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def outcomes(out: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in read_json_lines(out / STEPS)}


def test_all_steps_run_with_only_the_kit(kit: Path, target: Path, tmp_path: Path) -> None:
    """An injected failure and an injected hang end only their steps; all other steps use the packages of the kit."""
    out, scratch = tmp_path / "out", tmp_path
    faults = ("--inject", f"{FAILING}=fail", "--inject", f"{HANGING}=hang")
    process = start(kit, target, out, "--minutes", "25", *faults)
    printed, _ = process.communicate(timeout=5 * END_TIMEOUT_S)
    found = outcomes(out)
    assert process.returncode == 1, printed
    kinds = {name: line["outcome"] for name, line in found.items()}
    assert kinds.pop(FAILING) == "failed"
    assert kinds.pop(HANGING) == "timeout"
    assert kinds.pop(SKIPPED) == "skipped"
    assert "deepspeed" in found[SKIPPED]["reason"]
    log = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    failed = {name for name, kind in kinds.items() if kind != "ok"}
    assert not failed, [part[-4000:] for part in log.split("\n===== ") if part.partition(":")[0] in failed]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {str(path.relative_to(out)) for path in files} == set(FILES)
    assert len(files) <= MAX_FILES
    modules = json.loads((out / FACTS).read_text(encoding="utf-8"))["modules"]
    paths = [modules[n] for n in ("repro", "repro.kernels", "pydantic", "scipy", "submitit", "pyroute2")]
    assert all("/kit/" in path and path.startswith(str(scratch)) for path in paths), modules
    assert modules["torch"].startswith(str(target.parents[1]))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("repro-gpu-day")] == []
    records = list(read_json_lines(out / RECORDS))
    commits = {record["provenance"]["git"]["commit"] for record in records}
    assert commits == {json.loads((kit / "source" / "kit.json").read_text(encoding="utf-8"))["git"]["commit"]}


def test_a_signal_ends_the_rehearsal_and_names_skipped_steps(kit: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(kit, target, out, "--inject", "gpu-tests=hang")
    printed: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        printed.extend(process.stdout)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: "facts" in outcomes(out), END_TIMEOUT_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_TIMEOUT_S) == 130, printed
    reader.join()
    found = outcomes(out)
    assert found["facts"]["outcome"] == "ok"
    assert "interrupted" in found["low-bandwidth-twin"]["reason"]
    skipped = [line["outcome"] for name, line in found.items() if name not in ("facts", "gpu-tests")]
    assert set(skipped) == {"skipped"}
    assert any("low-bandwidth-twin: skipped" in line for line in printed)


def test_a_kit_for_another_python_version_is_refused(kit: Path, tmp_path: Path) -> None:
    """The error is one line."""
    other = tmp_path / "python"
    start_file = str(kit / "gpu" / "start.py")
    code = f"import sys; sys.version_info = (2, 7); __file__ = {start_file!r}; exec(open(__file__).read())"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    other.chmod(0o755)
    done = subprocess.run(
        ["bash", str(kit / "gpu" / "run.sh")],
        env={**os.environ, "PYTHON": str(other)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "is Python 2.7, and the kit is for" in done.stderr
