"""A rank target without torch: ranks write heartbeats, meet at file barriers and fail on request.

With `FAKE_BUSY`, rank 0 reports a port in use once and creates the file of that name.
An experiment stays in its second step as long as a file of its name is in the folder `FAKE_HOLD`.
`FAKE_FAULT` lists faults as `KIND:NAME:RANK:STEP`, separated by commas. `NAME` is the
name of an experiment; faults do not change its key.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from repro.launch.job import Job


class Diverged(FloatingPointError):
    """The loss is not a number."""


class _Ring:
    """A barrier of `world` processes through files; it raises the error of gloo when a peer is dead."""

    def __init__(self, url: str, rank: int, world: int):
        if url.startswith("tcp://"):  # no other launch has this address and port
            self.folder = Path(os.environ["FAKE_RING"]) / url.removeprefix("tcp://")
        else:
            self.folder = Path(url.removeprefix("file://") + ".d")
        self.folder.mkdir(exist_ok=True)
        self.rank, self.world, self.count = rank, world, 0
        (self.folder / f"pid-{rank}").write_text(str(os.getpid()))
        self.wait()

    def wait(self) -> None:
        self.count += 1
        (self.folder / f"at-{self.rank}-{self.count}").touch()
        for peer in range(self.world):
            arrival = self.folder / f"at-{peer}-{self.count}"
            while not arrival.exists():
                # On a loaded machine a peer may arrive and exit between the two checks.
                if self._dead(peer) and not arrival.exists():
                    raise RuntimeError(f"[gloo/transport] Connection closed by peer {peer}")
                time.sleep(0.002)

    def _dead(self, peer: int) -> bool:
        pid = self.folder / f"pid-{peer}"
        number = pid.read_text() if pid.exists() else ""
        return bool(number) and not Path(f"/proc/{number}/cwd").exists()


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: Any
) -> dict[str, dict[str, Any]]:
    """Imitate the training of every experiment of the job."""
    faults = [fault.split(":") for fault in os.environ.get("FAKE_FAULT", "").split(",") if fault]
    step_s = float(os.environ.get("FAKE_STEP_S", "0.01"))
    log = os.environ.get("FAKE_LOG")
    hold = Path(os.environ.get("FAKE_HOLD", "/nonexistent"))
    busy = os.environ.get("FAKE_BUSY")
    if busy and rank == 0 and not Path(busy).exists():
        Path(busy).touch()
        raise RuntimeError(
            "The server socket has failed to listen: port in use (EADDRINUSE: address already in use)"
        )
    ring = _Ring(rendezvous, rank, world)
    results = {}
    sequence = 0
    for index, experiment in enumerate(job.experiments):
        heartbeat.phase(index, 0, "init")
        if log and rank == 0:
            with open(log, "a") as file:
                file.write(experiment.name + "\n")
        for step in range(experiment.training.steps):
            for phase in ("forward", "backward", "optimizer"):
                heartbeat.phase(index, step, phase)
                while step and (hold / experiment.name).exists():
                    time.sleep(0.02)
                if phase == "backward":
                    sequence += 1
                    heartbeat.collective(sequence, "all_reduce", "dp")
                    for kind, name, fault_rank, fault_step in faults:
                        if (name, int(fault_rank), int(fault_step)) == (experiment.name, rank, step):
                            _inject_fault(kind)
                    ring.wait()
            time.sleep(step_s)
        heartbeat.phase(index, experiment.training.steps, "done")
        results[experiment.key] = _result(experiment, rank, job.rounds)
        if not job.compare:
            heartbeat.finished(index, results[experiment.key])
    return results


_ABORTS = {
    "abort": "after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "abort-in-torch": "after throwing an instance of 'c10::Error'\n"
    "  what():  [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "abort-otherwise": "without an active exception",
    "watchdog": """after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: NCCL error: \
remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""
    + "frame #7: clone3 + 0x2c (0x7f in /usr/lib/x86_64-linux-gnu/libc.so.6)\n" * 100,
    "watchdog-device": """after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: \
an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call""",
}
HARMLESS = "can't allocate memory is what a library says that then does without\n"
ABORTS = {kind: f"{HARMLESS}terminate called {text}\n" for kind, text in _ABORTS.items()}
"""Text that the C++ runtime prints before it aborts a process, by fault."""


def _inject_fault(kind: str) -> None:
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "memory":
        blocks = []
        while True:  # ends at the memory limit that the test sets
            blocks.append(bytearray(1 << 20))
    elif kind in ABORTS:
        os.write(2, ABORTS[kind].encode())
        os.abort()
    elif kind == "nan":
        raise Diverged("loss is nan")
    elif kind in ("raise", "raise-late"):
        time.sleep(0.5 if kind == "raise-late" else 0.0)
        raise KeyError("injected failure")
    else:
        raise AssertionError(kind)


def _result(experiment: Any, rank: int, rounds: int) -> dict[str, Any]:
    timed = experiment.training.steps - experiment.training.untimed_steps
    states = {"parameters": 4000, "gradients": 4000, "optimizer": 8000}
    peak = {"total": 20000, **states, "activations": 2000, "checkpoints": 1000, "communication": 500}
    peak |= {"other": 500, "host": 600}
    traffic = {"op": "all_reduce", "group": "dp", "purpose": "gradients", "size": 2, "calls": 3}
    return {
        "rank": rank,
        "outcome": "ok",
        "reason": "",
        "loss": [5.0 - 0.1 * step for step in range(experiment.training.steps)],
        "grad_norm": [1.0] * experiment.training.steps,
        "loss_scale": [],
        "skipped_steps": [],
        "rounds": [[0.1 + 0.001 * rank] * timed for _ in range(rounds)],
        "phase_seconds": {"forward": 0.03, "backward": 0.06, "optimizer": 0.01},
        "memory": {
            "states": {**states, "parameters": 4000 + rank},
            "peak": peak,
            "most": {**peak, "checkpoints": 1500, "host": 700},
            "init_peak_bytes": 16000,
            "rss_peak_bytes": 10**8,
            "cuda": {},
        },
        "comm": [{**traffic, "payload_bytes": 4000, "sent_bytes": 4000}],
        "comm_per_layer": [{"op": "all_reduce", "group": "tp", "calls": 4, "sent_bytes": 512}],
        "parameters": 1000,
    }
