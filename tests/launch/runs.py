"""Helpers that write suites and start `repro run` as a subprocess, with fake or real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# A shell starts background jobs with SIGINT ignored, and `repro run` keeps ignored signals ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from repro.cli import main
sys.exit(main())
"""
FAKE = "tests.launch.fake_session:run_rank"
MODEL = "\nlayers = 2\nhidden = 16\nheads = 4\nvocab = 256\nseq = 16\n"


def write_suite(folder: Path, body: str, *, name: str = "faults", limits: str = "hang_s = 60") -> Path:
    """Write a suite with a tiny model, two ranks and six steps, which `body` may override; return its path."""
    (folder / "tiny.toml").write_text(MODEL)
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
        [suite]
        name = "{name}"
        [defaults]
        model = "tiny.toml"
        layout = {{ dp = 2 }}
        training = {{ steps = 6, untimed_steps = 1 }}
        limits = {{ {limits} }}
        {body}
        """
    )
    return path


def experiments(*names: str, extra: str = "") -> str:
    """Return `[[experiment]]` tables that differ only in their seed."""
    return "\n".join(
        f'[[experiment]]\nname = "{name}"\ntraining.seed = {seed}\n{extra}' for seed, name in enumerate(names)
    )


def start(
    suite: Path, results: Path, *arguments: str, fake: bool = True, **variables: str
) -> subprocess.Popen[str]:
    """Start `repro run` in a new session."""
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if fake:
        environment["REPRO_RANK_TARGET"] = FAKE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", str(suite), "--results", str(results), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 250) -> tuple[int, str, str]:
    """Wait for the process; return its exit code, standard output and standard error."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run(
    suite: Path, results: Path, *arguments: str, fake: bool = True, **variables: str
) -> tuple[int, str, str]:
    """Run `repro run` to its end; return its exit code, standard output and standard error."""
    return finish(start(suite, results, *arguments, fake=fake, **variables))


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the rank processes of a `repro run`, sorted by rank."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "repro.launch.rank.program" in line:
            found.append((int(line[line.index("--rank") + 1]), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def wait_for(condition: Callable[[], bool], seconds: float = 250) -> None:
    """Return as soon as `condition` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition is still false"
        time.sleep(0.02)


@contextmanager
def no_orphans(process: subprocess.Popen[str]) -> Iterator[list[psutil.Process]]:
    """Yield the two running ranks, and assert at exit that both have ended."""
    wait_for(lambda: len(ranks_of(process)) == 2)
    ranks = ranks_of(process)
    yield ranks
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for orphan in alive:
        orphan.kill()
    assert not alive, f"orphans: {alive}"


@contextmanager
def small_disk(folder: Path, megabytes: int = 1) -> Iterator[Path]:
    """Mount a tmpfs of a few megabytes and yield its folder; skip the test if mounting is not permitted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no permission to mount a small disk: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def synced(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return a dictionary that receives the path and size in bytes of each file at each later `fsync`."""
    synced_bytes: dict[str, int] = {}
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced_bytes[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    return synced_bytes


def fill(disk: Path) -> None:
    """Fill the disk completely."""
    filling = subprocess.run(
        ["dd", "if=/dev/zero", f"of={disk}/filler", "bs=4k"], capture_output=True, text=True, check=False
    )
    assert "No space left" in filling.stderr
