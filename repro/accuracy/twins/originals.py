"""Which published experiments are compared: what a claim reads as simulated, or a baseline and its subjects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repro.claims.judge import experiments_read
from repro.claims.ledger import Claim
from repro.config import Experiment
from repro.config.errors import ConfigError
from repro.config.suites import Suite
from repro.config.systems import LOCAL_SYSTEMS


def of_claim(claim: Claim, suites: dict[str, Suite]) -> list[list[Experiment]]:
    """The comparisons that a claim's simulated evidence reads, each with its baseline first."""
    named: dict[str, None] = {}
    for row in claim.rows:
        for evidence in row.evidence:
            if evidence.kind == "simulated":
                named |= dict.fromkeys(experiments_read(evidence.value, row.variables))
    found = []
    for suite in suites.values():
        for comparison in suite.comparisons:
            members = [comparison.baseline, *comparison.subjects]
            if all(f"{suite.name}/{name}" in named for name in members):
                found.append([suite.entry(name).experiment for name in members])
    if not found:
        right = "a claim whose simulated evidence is a comparison, or SUITE/EXPERIMENT..."
        raise ConfigError("CLAIM", claim.id, right)
    return found


def named(names: Sequence[str], suites: dict[str, Suite]) -> list[list[Experiment]]:
    """Comparisons of experiments that are called `SUITE/NAME`.

    Where all are baselines in their suites, each brings its subjects; else they are one comparison, the first its
    baseline.  Raises `ConfigError`.
    """
    found, compared = [], []
    for full in names:
        suite, _, name = full.partition("/")
        if suite not in suites:
            raise ConfigError("SUITE/EXPERIMENT", full, f"a suite among {', '.join(suites)}")
        known = {entry.experiment.name: entry.experiment for entry in suites[suite].entries}
        if name not in known:
            raise ConfigError("SUITE/EXPERIMENT", full, f"an experiment among {', '.join(known)}")
        found.append(known[name])
        row = next((row for row in suites[suite].comparisons if row.baseline == name), None)
        compared.append([known[other] for other in (name, *(row.subjects if row is not None else ()))])
    if all(len(members) > 1 for members in compared):
        return [checked(members) for members in compared]
    return [checked(found)]


def checked(members: Iterable[Experiment]) -> list[Experiment]:
    """`members`, which all have a published system.  Raises `ConfigError`."""
    found = list(members)
    for experiment in found:
        if experiment.system in LOCAL_SYSTEMS:
            right = "an experiment of a published system, whose time can be predicted"
            raise ConfigError("SUITE/EXPERIMENT", experiment.name, right)
    return found
