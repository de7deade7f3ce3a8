"""`repro collect`: write down what no job could, check the records, and bring them to another folder."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Any

from repro.config import ConfigError
from repro.config.words import counted
from repro.launch.slurm.following.registry import Registry
from repro.launch.slurm.following.states import (
    CANCELLED,
    DONE,
    FAILED,
    LOST,
    PENDING,
    REQUEUED,
    RUNNING,
    CaseState,
    Survey,
)
from repro.launch.slurm.site.scheduler import Scheduler, SchedulerError
from repro.results.measured import experiment_record
from repro.results.schema import ExperimentRecord
from repro.results.store import Store


def command(results: Path, into: Path | None, json: bool) -> int:
    """Record lost and cancelled cases, verify every record, and copy what `into` lacks.

    Returns 0 if every case of the last submissions is done or still under way, 1 if some failed.
    """
    registry, scheduler = Registry(results), Scheduler()
    submissions = registry.all()
    if not submissions and into is None:
        raise ConfigError("--results", str(results), "a folder that `repro submit` has used")
    with Store(results) as store:
        try:
            cases = Survey(registry, store, scheduler).cases() if submissions else []
        except SchedulerError as error:
            raise ConfigError("SLURM", says=f"does not answer: {error}") from None
        cases = list({case.key: case for case in cases}.values())
        written = [case for case in cases if case.state in (LOST, CANCELLED) and not case.recorded]
        for case in written:
            store.append(lost_record(registry, case))
        records = store.records()
        copied = merge(store, into) if into is not None else 0
    failed = [case for case in cases if case.state in (FAILED, LOST, CANCELLED)]
    document = {
        "cases": [case.as_dict() for case in cases],
        "recorded": [case.name for case in written],
        "records": len(records),
        "copied": copied,
        "skipped_lines": store.skipped,
        "bad_nodes": bad_nodes(cases),
        "warnings": list(dict.fromkeys(scheduler.warnings)),
    }
    if json:
        print(jsonlib.dumps(document))
    else:
        _show(document, cases, results, into)
    return 1 if failed else 0


def lost_record(registry: Registry, case: CaseState) -> ExperimentRecord:
    """The record of a case whose job ended without one.  Its outcome is never conclusive: it runs again."""
    submission = next(s for s in registry.all() if s.id == case.submission)
    work = registry.work(submission)
    experiment = next(e for b in work.bundles for e in b.experiments if e.key == case.key)
    job = {"job_id": case.job, "nodes": case.nodes, "restarts": case.restarts, "state": case.job_state}
    return experiment_record(
        experiment,
        [],
        suite=submission.suite,
        provenance={"slurm": job},
        wall_s=0.0,
        outcome=case.outcome,
        reason=case.detail,
    )


def merge(store: Store, into: Path) -> int:
    """Append to the store at `into` what it lacks of `store`, by id; how many that were."""
    with Store(into) as mine:
        return mine.take_over(store)


def bad_nodes(cases: list[CaseState]) -> dict[str, int]:
    """Nodes that a failure names, with the number of cases that it cost: candidates for `slurm.exclude`."""
    counts: dict[str, int] = {}
    for case in cases:
        if case.failure in ("node-failure", "lost-node", "wrong-hardware"):
            for node in _named(case):
                counts[node] = counts.get(node, 0) + 1
    return counts


def _named(case: CaseState) -> list[str]:
    """The nodes that the reason of a failure names among those that the case had; all of them if it names none."""
    from submitit.slurm.slurm import _parse_node_list

    nodes = [node for node in _parse_node_list(case.nodes) if node] if case.nodes else []
    words = case.detail.replace(",", " ").replace(":", " ").replace(";", " ").split()
    return [node for node in nodes if node in words] or nodes


def _show(document: dict[str, Any], cases: list[CaseState], results: Path, into: Path | None) -> None:
    for remark in document["skipped_lines"]:
        print(f"note: {remark}", file=sys.stderr)
    for warning in document["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    for case in cases:
        if case.state not in (DONE,) and case.outcome:
            print(f"{case.name}: {case.failure or case.outcome}: {case.detail}")
    for node, count in document["bad_nodes"].items():
        print(
            f"node {node} is named in {counted(count, 'failure')}: `repro submit --exclude {node}` keeps away from it"
        )
    done = sum(case.state == DONE for case in cases)
    still = sum(case.state in (PENDING, RUNNING, REQUEUED) for case in cases)
    print(
        f"{done} of {len(cases)} cases done"
        + (f", {still} still wait or run" if still else "")
        + f"; {len(document['recorded'])} lost or cancelled ones recorded now"
    )
    print(f"{document['records']} records in {results}/records")
    if into is not None:
        print(f"{document['copied']} of them are new in {into}/records")
