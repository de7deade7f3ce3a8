"""What a submission is, for people and as data: its arrays, cases, GPU-hours and scripts."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Any

from repro.config import Experiment
from repro.config.words import counted
from repro.launch.slurm.site.limits import clock
from repro.launch.slurm.submission import script
from repro.launch.slurm.submission.intent import Intent
from repro.launch.slurm.submission.pack import Array
from repro.util import units

_SUBMISSION = "SUBMISSION"
"""Stands for the name that a real submission gets."""


def show(intent: Intent, results: Path, *, json: bool) -> None:
    """Print what would be submitted."""
    if json:
        print(jsonlib.dumps(document(intent, results)))
        return
    for place, array in enumerate(intent.arrays):
        print(f"# array {place}: {line(array)}")
        for bundle in array.bundles:
            print(f"#   {', '.join(_case(intent, experiment) for experiment in bundle.experiments)}")
        print(_text(intent, results, place, array))
    left_out(intent)
    most, predicted, count = intent.gpu_hours()
    what = "GPU-hours" if intent.profile.gpus_per_node else "core-hours"
    print(
        f"{counted(len(intent.cases), 'case')} in {counted(len(intent.arrays), 'job array')};"
        f" at most {units.number(most)} {what}" + _price(intent, most)
    )
    if count:
        print(
            f"the time model predicts {units.number(predicted)} {what} of steps for {count} of them"
            + _price(intent, predicted)
        )
    elif intent.cases and intent.profile.gpus_per_node:
        print("no predicted times in the store: `repro run SUITE --evidence simulated` makes them")
    print("nothing was submitted (--dry-run)")


def document(intent: Intent, results: Path) -> dict[str, Any]:
    """The same as data."""
    most, predicted, count = intent.gpu_hours()
    return {
        "arrays": [
            {
                "nodes": array.shape.nodes,
                "tasks_per_node": array.shape.tasks_per_node,
                "time_limit_s": array.shape.time_min * 60,
                "partition": array.shape.partition,
                "bundles": [[e.name for e in bundle.experiments] for bundle in array.bundles],
                "script": _text(intent, results, place, array),
            }
            for place, array in enumerate(intent.arrays)
        ],
        "cases": [e.name for e in intent.cases],
        "gpu_hours": {"most": most, "predicted": predicted, "predicted_cases": count},
        "price": intent.profile.price_per_gpu_hour * most,
        "not_for_this_profile": intent.elsewhere,
        "known": list(intent.known),
        "running": intent.running,
        "predicted_out_of_memory": _too_large(intent),
    }


def line(array: Array) -> str:
    """One array in words."""
    shape, count = array.shape, len(array.bundles)
    cases = sum(len(bundle.experiments) for bundle in array.bundles)
    size = f"{counted(shape.nodes, 'node')} x {counted(shape.tasks_per_node, 'rank')}"
    where = f", partition {shape.partition}" if shape.partition else ""
    return (
        f"{counted(cases, 'case')} in {counted(count, 'job')} of {size}, {clock(shape.time_min)} each{where}"
    )


def left_out(intent: Intent) -> None:
    """Say which cases are not submitted, and why."""
    for name, job in intent.running.items():
        print(f"{name}: job {job} is at it")
    if intent.known:
        print(f"{len(intent.known)} in the store already (--rerun runs them again)")
    if intent.elsewhere:
        first = next(iter(intent.elsewhere))
        print(
            f"{len(intent.elsewhere)} not for nodes of {intent.profile.system}: {first} needs"
            f" {intent.elsewhere[first]}" + (", ..." if len(intent.elsewhere) > 1 else "")
        )
    for name in _too_large(intent):
        print(f"{name}: simulated out of memory: it will not fit")


def _too_large(intent: Intent) -> list[str]:
    """Cases that are predicted to run out of memory where that is not what is expected."""
    expected = {entry.experiment.name for entry in intent.entries if entry.expect == "oom"}
    return [
        name for name, found in intent.predictions.items() if found.outcome == "oom" and name not in expected
    ]


def _case(intent: Intent, experiment: Experiment) -> str:
    found = intent.predictions.get(experiment.name)
    if found is None or found.gpu_hours is None:
        return experiment.name
    return f"{experiment.name} ({units.number(found.gpu_hours)} GPU-hours)"


def _price(intent: Intent, hours: float) -> str:
    price = intent.profile.price_per_gpu_hour
    return f", {price * hours:.2f} at {price:g} an hour" if price else ""


def _text(intent: Intent, results: Path, place: int, array: Array) -> str:
    folder = results / "jobs" / _SUBMISSION / "submitit"
    return script.text(array, intent.profile, f"repro-{_SUBMISSION}-{place}", folder)
