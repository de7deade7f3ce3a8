"""A large synthetic store: invented records of all suites' experiments, reruns, failures, many hosts and commits."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from repro.claims.run_commands import SuiteCatalogue
from repro.config import Experiment, systems
from repro.launch.simulated import simulate_experiment
from repro.results.measured import comparison_record, experiment_record
from tests.report import synthetic

FILES, COMMITS, HOSTS = 25, 30, 40


@lru_cache(maxsize=1)
def _template_records() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a measured, a simulated and a comparison record with the fields and the size of real records."""
    e = synthetic.experiment("shape", dp=2, tp=2, zero=2, global_batch=4)
    common = {"suite": "shape", "provenance": synthetic.PROVENANCE}
    measured = experiment_record(e, synthetic.results(e), wall_s=1.0, **common)
    small = Experiment(name="shape", model=e.model, layout=e.layout, system="selene")
    simulated = simulate_experiment(small, systems.load_system_file("selene"), "shape")
    comparison = comparison_record(e, e, (synthetic.results(e), synthetic.results(e, 1.1)), **common)
    assert comparison is not None
    return measured.as_dict(), simulated.as_dict(), comparison.as_dict()


def store(root: Path, count: int) -> Path:
    """Write a store with `count` records: first every experiment of every suite, then other names and reruns."""
    named = [
        (suite.name, entry.experiment.name, entry.experiment.as_dict())
        for suite in SuiteCatalogue().suites.values()
        for entry in suite.entries
    ]
    measured, simulated, comparison = _template_records()
    lines: list[list[str]] = [[] for _ in range(FILES)]
    for number in range(count):
        suite, name, experiment = named[number // 2 % len(named)]
        repetition = number // (2 * len(named))
        if repetition % 2:  # odd repetitions are experiments that no claim reads
            name = f"{name}-{repetition}"
        fields = {
            "id": f"{number:032x}",
            "suite": suite,
            "name": name,
            "written": f"2026-01-{1 + number * 28 // count:02d}T{number % 24:02d}:00:00.{number:06d}+00:00",
            "provenance": {
                **synthetic.PROVENANCE,
                "git": {"commit": f"{number * COMMITS // count:040x}", "dirty": False, "diff": None},
                "host": f"host-{number % HOSTS}",
            },
        }
        if number % 50 == 49:
            sides = {
                side: {"name": f"{name}-{side}", "key": f"{side}{number}"} for side in ("baseline", "subject")
            }
            record = {**comparison, **fields, **sides}
        else:
            shape = simulated if number % 2 else measured
            record = {**shape, **fields, "key": f"{number:016x}", "experiment": experiment}
            if number % 37 == 0:
                record |= {"outcome": "hang", "reason": "rank 3 stopped", "metrics": {}, "series": {}}
        lines[number % FILES].append(json.dumps(record, separators=(",", ":")))
    folder = root / "records"
    folder.mkdir(parents=True)
    for number, part in enumerate(lines):
        (folder / f"writer-{number}.jsonl").write_text("\n".join(part) + "\n" if part else "")
    return root
