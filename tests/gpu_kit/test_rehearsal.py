"""Tests of a GPU day's rehearsal with only the kit: no network, a read-only kit, a failure, a hang and a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from repro.launch.gpu_day.result_files import FACTS, FILES, MAX_FILES, RECORDS, STEPS, read_json_lines
from tests.gpu_kit.target import offline_command

END_TIMEOUT_S = 300
FAILING, HANGING = "step-micro-batch-1", "memcheck"
SKIPPED = "limit-offload"
"""Step that needs a library which neither the target nor the kit has."""


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
    deadline = time.monotonic() + END_TIMEOUT_S
    while "facts" not in outcomes(out):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_TIMEOUT_S) == 130, printed
    reader.join()
    found = outcomes(out)
    assert found["facts"]["outcome"] == "ok"
    assert "interrupted" in found["low-bandwidth-twin"]["reason"]
    assert {line["outcome"] for name, line in found.items() if name not in ("facts", "gpu-tests")} == {
        "skipped"
    }
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
