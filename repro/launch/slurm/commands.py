"""Commands on submitted suites: `repro logs`, `repro cancel` and `repro collect`."""

from __future__ import annotations

import difflib
import json as jsonlib
import re
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from repro.config import ConfigError, require
from repro.config.words import count_noun
from repro.launch.slurm.allocation.bundle import Bundle
from repro.launch.slurm.case_states import (
    CANCELLED,
    DONE,
    FAILED,
    LOST,
    OPEN_STATES,
    CaseState,
    CaseSurvey,
    Registry,
    Submission,
    read_case_states,
)
from repro.launch.slurm.scheduler import Scheduler, SchedulerError
from repro.results.measured import experiment_record
from repro.results.schema import ExperimentRecord
from repro.results.store import Store

LOG_TAIL_BYTES = 8000
MAX_LISTED_NAMES = 8


def print_logs(results: Path, name: str, rank: int | None) -> int:
    """Print the end of the logs of experiment `name`: of one `rank`, or of its SLURM job for None; return 0."""
    registry = Registry(results)
    submission, bundle, key = find_case(registry, name)
    folder = registry.path(submission)
    job = submission.jobs().get(bundle.index, "")
    # While experiments run in one launch, the logs of all are in the folder of its first experiment.
    running = (registry.state(submission, bundle.index).get("current") or {}).get("names", [])
    if name in running:
        key = next(experiment.key for experiment in bundle.experiments if experiment.name == running[0])
    ranks = folder / "logs" / str(bundle.index) / key
    if rank is None:
        files = sorted((folder / "submitit").glob(f"{job}_0_log.*")) if job else []
        _print_tails(files, f"job {job or 'none'} of {name}")
        found = sorted(ranks.glob("rank-*.err"), key=lambda path: int(path.stem.partition("-")[2]))
        if found:
            numbers = ", ".join(path.stem.partition("-")[2] for path in found)
            print(f"ranks with logs: {numbers}; --rank R prints the log of rank R")
        return 0
    require(0 <= rank < bundle.world, "--rank", rank, f"0 to {bundle.world - 1}")
    files = [path for path in (ranks / f"rank-{rank}.out", ranks / f"rank-{rank}.err") if path.exists()]
    _print_tails(files, f"rank {rank} of {name}; the logs of a rank exist while it runs, and after a failure")
    return 0


def find_case(registry: Registry, name: str) -> tuple[Submission, Bundle, str]:
    """Return the newest submission of the experiment `name`, with bundle and key. Raises `ConfigError`."""
    known: list[str] = []
    for submission in reversed(registry.all()):
        for bundle in registry.work(submission).bundles:
            for experiment in bundle.experiments:
                if experiment.name == name:
                    return submission, bundle, experiment.key
                known.append(experiment.name)
    hint = f": {list_names(name, known)}" if known else ", but the results folder has no submission"
    raise ConfigError("case", name, f"a submitted case{hint}")


def list_names(name: str, known: list[str]) -> str:
    """Return `known` names as one line of text: at most `MAX_LISTED_NAMES`, the most similar to `name`."""
    names = list(dict.fromkeys(known))
    if len(names) <= MAX_LISTED_NAMES:
        return ", ".join(names)
    shown = difflib.get_close_matches(name, names, n=MAX_LISTED_NAMES, cutoff=0.3) or names[:MAX_LISTED_NAMES]
    return f"{', '.join(shown)} ({len(shown)} of {len(names)})"


def _print_tails(files: list[Path], what: str) -> None:
    if not files:
        print(f"no log: {what}")
    for path in files:
        data = path.read_bytes()
        part = f" (last {LOG_TAIL_BYTES} of {len(data)} bytes)" if len(data) > LOG_TAIL_BYTES else ""
        print(f"==> {path}{part}")
        print(data[-LOG_TAIL_BYTES:].decode(errors="replace").rstrip())


def cancel_jobs(results: Path, what: str) -> int:
    """Cancel the waiting and running jobs that `what` selects; return the exit code 0.

    `what` is a suite's name or file, a submission's id, or a glob of experiment names; empty selects all jobs. Other
    experiments in a cancelled job are cancelled too, and the function prints their names.
    """
    registry, scheduler = Registry(results), Scheduler()
    require(registry.all(), "--results", str(results), "a folder that `repro submit` has used")
    try:
        cases = CaseSurvey(registry, Store(results), scheduler).cases()
        open_cases = [case for case in cases if case.state in OPEN_STATES]
        files = {submission.id: submission.suite_file for submission in registry.all()}
        places = {case: (case.suite, case.submission, files[case.submission]) for case in open_cases}
        chosen = [c for c in open_cases if not what or what in places[c] or fnmatchcase(c.name, what)]
        if not chosen:
            known = list_names(what, [case.name for case in open_cases]) or "none"
            raise ConfigError("cancel", what, f"a suite, submission or case that waits or runs: {known}")
        jobs = list(dict.fromkeys(case.job for case in chosen))
        names = {case.name for case in chosen}
        for case in open_cases:
            if case.job in jobs and case.name not in names:
                print(f"{case.name} is cancelled too, because it shares job {case.job}.")
        scheduler.cancel(jobs)
    except SchedulerError as error:
        raise ConfigError("SLURM", says=f"does not answer: {error}") from None
    what = f"{count_noun(len(jobs), 'job')} of {count_noun(len(names), 'case')}"
    print(f"Cancelled {what}. Next: repro collect")
    return 0


def collect_records(results: Path, into: Path | None, json: bool) -> int:
    """Write records of lost and cancelled experiments, and copy new records to a second store, `into`, if it is set.

    Returns the exit code: 1 if an experiment failed, was lost or was cancelled in its last submission, else 0.
    """
    registry = Registry(results)
    if not registry.all() and into is None:
        raise ConfigError("--results", str(results), "a folder that `repro submit` has used")
    with Store(results) as store:
        try:
            cases, warnings = read_case_states(registry, store, every=False)
        except SchedulerError as error:
            raise ConfigError("SLURM", says=f"does not answer: {error}") from None
        written = [case for case in cases if case.state in (LOST, CANCELLED) and not case.recorded]
        for case in written:
            store.append(lost_record(registry, case))
        records = store.records()
        copied = 0
        if into is not None:
            with Store(into) as target:
                copied = target.take_over(store)
    failed = [case for case in cases if case.state in (FAILED, LOST, CANCELLED)]
    document = {
        "cases": [case.as_dict() for case in cases],
        "recorded": [case.name for case in written],
        "records": len(records),
        "copied": copied,
        "skipped_lines": store.skipped,
        "bad_nodes": count_bad_nodes(cases),
        "warnings": warnings,
    }
    if json:
        print(jsonlib.dumps(document))
    else:
        _print_collected(document, cases, results, into)
    return 1 if failed else 0


def lost_record(registry: Registry, case: CaseState) -> ExperimentRecord:
    """Return a record for an experiment whose SLURM job wrote none; `repro submit` then repeats the experiment."""
    submission = next(s for s in registry.all() if s.id == case.submission)
    work = registry.work(submission)
    experiment = next(e for b in work.bundles for e in b.experiments if e.key == case.key)
    job = {"job_id": case.job, "nodes": case.nodes, "restarts": case.restarts, "state": case.job_state}
    end = {"outcome": case.outcome, "reason": case.detail}
    return experiment_record(
        experiment, [], suite=submission.suite, provenance={"slurm": job}, wall_s=0.0, **end
    )


def count_bad_nodes(cases: list[CaseState]) -> dict[str, int]:
    """Return the number of experiments that failed because of each node, so that the user can exclude bad nodes."""
    failed = [case for case in cases if case.failure in ("node-failure", "lost-node", "wrong-hardware")]
    return dict(Counter(node for case in failed for node in _named_nodes(case)))


def _named_nodes(case: CaseState) -> list[str]:
    """Return the nodes that the failure reason of an experiment names, or all its nodes if the reason names none."""
    from submitit.slurm.slurm import _parse_node_list

    nodes = [node for node in _parse_node_list(case.nodes) if node] if case.nodes else []
    words = re.split(r"[\s,:;]+", case.detail)
    return [node for node in nodes if node in words] or nodes


def _print_collected(
    document: dict[str, Any], cases: list[CaseState], results: Path, into: Path | None
) -> None:
    done = sum(case.state == DONE for case in cases)
    still = sum(case.state in OPEN_STATES for case in cases)
    new = len(document["recorded"])
    print(
        f"{done} of {len(cases)} cases done, {still} waiting or running, {new} lost or cancelled and recorded."
    )
    print(f"{document['records']} records in {results}/records.")
    if into is not None:
        print(f"{document['copied']} of the records are new in {into}/records.")
    for node, count in document["bad_nodes"].items():
        print(f"{count_noun(count, 'failure')} because of node {node}; use `repro submit --exclude {node}`.")
    failed = [case for case in cases if case.state != DONE and case.outcome]
    for case in failed[:MAX_LISTED_NAMES]:
        print(f"{case.name}: {case.failure or case.outcome}: {case.detail}.")
    if len(failed) > MAX_LISTED_NAMES:
        print(f"{len(failed) - MAX_LISTED_NAMES} more cases: repro status --details")
    for remark in document["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
    for warning in document["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
