"""`repro logs`: what the ranks of a case, or the job around it, wrote last."""

from __future__ import annotations

import difflib
from pathlib import Path

from repro.config import ConfigError
from repro.launch.slurm.allocation.work import Bundle
from repro.launch.slurm.following.registry import Registry, Submission

TAIL_BYTES = 8000
FEW = 8


def command(results: Path, name: str, rank: int | None) -> int:
    """Print the end of the logs of the case `name` in its newest submission; of one rank, or of its job."""
    registry = Registry(results)
    submission, bundle, key = find(registry, name)
    folder = registry.path(submission)
    job = submission.jobs().get(bundle.index, "")
    ranks = folder / "logs" / str(bundle.index) / _folder(registry, submission, bundle, name, key)
    if rank is None:
        files = sorted((folder / "submitit").glob(f"{job}_0_log.*")) if job else []
        _print(files, f"job {job or 'none'} of {name}")
        found = sorted(ranks.glob("rank-*.err"), key=lambda path: int(path.stem.partition("-")[2]))
        if found:
            print(f"ranks: {', '.join(path.stem.partition('-')[2] for path in found)}; --rank R shows one")
        return 0
    if not 0 <= rank < bundle.world:
        raise ConfigError("--rank", rank, f"0 to {bundle.world - 1}")
    files = [path for path in (ranks / f"rank-{rank}.out", ranks / f"rank-{rank}.err") if path.exists()]
    _print(files, f"rank {rank} of {name} (logs are kept while it runs, and of failures)")
    return 0


def _folder(registry: Registry, submission: Submission, bundle: Bundle, name: str, key: str) -> str:
    """Where the logs of the case's ranks are: cases that share a launch share it while that runs."""
    running = (registry.state(submission, bundle.index).get("current") or {}).get("names", [])
    if name not in running:
        return key
    return next(experiment.key for experiment in bundle.experiments if experiment.name == running[0])


def find(registry: Registry, name: str) -> tuple[Submission, Bundle, str]:
    """The newest submission and bundle of the case `name`, and its key.  Raises `ConfigError`."""
    known: list[str] = []
    for submission in reversed(registry.all()):
        for bundle in registry.work(submission).bundles:
            for experiment in bundle.experiments:
                if experiment.name == name:
                    return submission, bundle, experiment.key
                known.append(experiment.name)
    hint = some(name, known) if known else "none: nothing was submitted with these results"
    raise ConfigError("case", name, f"a submitted case: {hint}")


def some(name: str, known: list[str]) -> str:
    """`known` for one line: all if they are few, else those most like `name`, and how many there are."""
    names = list(dict.fromkeys(known))
    if len(names) <= FEW:
        return ", ".join(names)
    shown = difflib.get_close_matches(name, names, n=FEW, cutoff=0.3) or names[:FEW]
    return f"{', '.join(shown)} ({len(shown)} of {len(names)})"


def _print(files: list[Path], what: str) -> None:
    if not files:
        print(f"no log: {what}")
    for path in files:
        data = path.read_bytes()
        print(
            f"==> {path}" + (f" (last {TAIL_BYTES} of {len(data)} bytes)" if len(data) > TAIL_BYTES else "")
        )
        print(data[-TAIL_BYTES:].decode(errors="replace").rstrip())
