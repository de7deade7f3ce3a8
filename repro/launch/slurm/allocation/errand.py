"""One job on all nodes of an allocation whose results the submitting process waits for: `repro calibrate --profile`.

The same launch as a suite's, without a store: results come back in a file.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.launch import supervise
from repro.launch.job import Job
from repro.launch.slurm.allocation import controller, nodes
from repro.launch.slurm.allocation.launch import ClusterLaunch
from repro.launch.slurm.allocation.stop import REQUEUE, Stop
from repro.util.files import write_json

JOB, ANSWER = "job.json", "answer.json"


@dataclass(frozen=True)
class Errand:
    """What the job calls.  submitit pickles it; it cannot be requeued."""

    folder: str
    """On a shared folder: the job, the profile, and the answer."""
    target: str
    """What a rank calls, `module:function`."""

    def __call__(self) -> str:
        """Run the job; the outcome."""
        environment, folder = dict(os.environ), Path(self.folder)
        stop = Stop(controller.job_of(environment))
        for number in (REQUEUE, signal.SIGTERM):
            signal.signal(number, stop.note)
        answer = _run(folder, self.target, stop, environment)
        write_json(folder / ANSWER, answer)
        return str(answer["outcome"])


def _run(folder: Path, target: str, stop: Stop, environment: dict[str, str]) -> dict[str, Any]:
    """The answer: outcome, reason, where it ran, the load of this node before, and the ranks' results."""
    answer: dict[str, Any] = {"outcome": "error", "load": round(os.getloadavg()[0], 2), "results": []}
    allocation = controller.allocated(folder, environment)
    reports, missing = controller.survey(allocation, folder / "nodes", stop)
    if missing:
        return answer | {"reason": stop.reason or missing}
    answer["place"] = nodes.place(reports, environment)
    if wrong := controller.wrong_hardware(reports, allocation.site):
        return answer | {"reason": wrong}
    names = [report.node for report in reports]
    launch = ClusterLaunch(
        Job.load(folder / JOB), folder / "ranks", allocation, names, target=target, stop=stop
    )
    try:
        launch.start()
        ending = supervise.watch(launch, interrupted=lambda: stop.reason)
        answer |= {"outcome": ending.outcome, "reason": ending.reason, "results": launch.results(0) or []}
    finally:
        launch.close(keep_logs=None if answer["outcome"] == "ok" else folder / "ranks")
    return answer
