"""Commands that create missing evidence: `repro run`, `repro submit` and `repro evaluate`.

The module reads suites and runs nothing. Experiment names are combined to globs, so that commands are short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from repro.claims.evidence import run_command
from repro.claims.expression import arguments, evaluate_expression
from repro.claims.formulas import CONSTANTS
from repro.claims.independence import SCORE_FUNCTION
from repro.claims.judge import experiments_read
from repro.claims.ledger import Claim, Ledger, Row
from repro.claims.one_device import DEVICE_FUNCTIONS, device_functions
from repro.claims.records import Missing, evaluation
from repro.config import suites
from repro.config.errors import ConfigError
from repro.config.files import read_toml
from repro.config.suites import PROFILES, SUITES, Suite
from repro.config.systems import LOCAL_SYSTEMS
from repro.results.schema import SIMULATED
from repro.results.select import select

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class EvidenceCommand:
    """Command that creates the records of one kind of evidence, and the experiments that the command runs."""

    kind: str
    """Kind of the evidence: `simulated`, `emulated` or `measured`."""
    text: str
    needs: str
    """Devices and system that a command needs, such as `400 GPUs of dgx2`; empty if any machine suffices."""
    suite: str = ""
    names: tuple[str, ...] = ()


HEADLINES = "headlines"
"""Value of the option `--claim` that selects the claims of the headline table (best-known statements)."""


def experiments_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return (kind of evidence, `suite/name`) of each experiment that tests published values, without duplicates."""
    read = [
        (evidence.kind, name)
        for row in rows
        for evidence in row.evidence
        if evidence.kind != "analytic"
        for part in (evidence.value, evidence.expect)
        if part
        for name in experiments_read(part, row.variables)
    ]
    return list(dict.fromkeys(read))


def named_experiments(ledger: Ledger, name: str, evidence: str) -> list[str]:
    """Return the experiments, as `suite/name`, that the measured or simulated evidence for a claim reads.

    `name`: id of a claim, its number in the headline table, or `HEADLINES`. Measured evidence includes emulated
    evidence.

    Raises: ConfigError: No claim has this name, or no experiment is evidence of this kind.
    """
    rows: Iterable[Row]
    if name == HEADLINES:
        rows = [row for headline in ledger.headlines for row in ledger.rows_of(headline)]
    else:
        rows = ledger.claim(name).rows
    found = {full for kind, full in experiments_of(rows) if (kind == SIMULATED) == (evidence == SIMULATED)}
    if not found:
        right = f"has no {evidence} evidence; `repro claims {name}` lists its evidence"
        raise ConfigError("--claim", name, says=right)
    return sorted(found)


class SuiteCatalogue:
    """Catalogue of the packaged suites by name, and of the SLURM profile of each hardware system."""

    def __init__(self) -> None:
        self.suites: dict[str, Suite] = {
            suite.name: suite for suite in map(suites.load_suite, SUITES.files())
        }
        self._profiles: dict[str, str] = {}
        for path in PROFILES.files():
            system = str(read_toml(path).get("system", ""))
            if path.stem not in ("generic", "lab"):
                self._profiles.setdefault(system, f"slurm/{path.name}")

    def commands(self, experiments: Iterable[tuple[str, str]]) -> list[EvidenceCommand]:
        """Return the commands, sorted by suite, that create the records of `experiments`.

        `experiments`: pairs (kind of evidence, `suite/name`). Those simulated on a cluster also get measuring commands.
        """
        wanted: dict[tuple[str, str, str], set[str]] = {}
        for kind, full in experiments:
            suite, _, name = full.partition("/")
            system = self._system(suite, name)
            at = (suite, "" if kind == "simulated" else system, kind)
            wanted.setdefault(at, set()).add(name)
            if kind == "simulated" and system not in ("", *LOCAL_SYSTEMS):
                wanted.setdefault((suite, system, "measured"), set()).add(name)
        return [self._command(*at, names) for at, names in sorted(wanted.items())]

    def _system(self, suite: str, name: str) -> str:
        """Return the name of the hardware system of an experiment; empty for an unknown suite."""
        known = self.suites.get(suite)
        found = [e.experiment.system for e in known.entries if e.experiment.name == name] if known else []
        return found[0] if found else ""

    def _command(self, suite: str, system: str, kind: str, names: set[str]) -> EvidenceCommand:
        known = self.suites.get(suite)
        every = [entry.experiment.name for entry in known.entries] if known else sorted(names)
        only = (
            ""
            if set(every) == names
            else "".join(f" --only '{glob}'" for glob in covering_globs(names, every))
        )
        needs = ""
        text = run_command(suite, kind) + only
        if kind != SIMULATED and system not in ("", *LOCAL_SYSTEMS):
            assert known is not None
            profile = self._profiles.get(system, "YOURS.toml")
            text = f"repro submit suites/{Path(known.file).name} --profile {profile}{only}"
            worlds = [e.experiment.layout.world for e in known.entries if e.experiment.name in names]
            needs = f"{max(worlds, default=0)} GPUs of {system}"
        return EvidenceCommand(kind=kind, text=text, needs=needs, suite=suite, names=tuple(sorted(names)))


def evaluation_commands(claim: Claim) -> list[EvidenceCommand]:
    """Return the commands that evaluate model weights for the published scores of a claim."""
    found: dict[str, EvidenceCommand] = {}
    for row in claim.rows:
        for evidence in row.evidence:
            for function, texts in arguments(evidence.value, row.variables):
                if function == SCORE_FUNCTION:
                    text = evaluation(*texts[1:3])
                    needs = row.needs or "the weights of the model, which were not released"
                    found.setdefault(text, EvidenceCommand(kind="measured", text=text, needs=needs))
    return list(found.values())


def device_commands(claim: Claim) -> list[EvidenceCommand]:
    """Return the commands that measure values of a claim on one GPU."""
    empty = device_functions(select([]), [])
    found: dict[str, EvidenceCommand] = {}
    for row in claim.rows:
        for evidence in row.evidence:
            if not evidence.value.calls & DEVICE_FUNCTIONS:
                continue
            try:
                evaluate_expression(evidence.value, empty, {**CONSTANTS, **row.variables})
            except Missing as missing:
                command = EvidenceCommand(kind="measured", text=missing.remedy, needs="one GPU")
                found.setdefault(missing.remedy, command)
    return list(found.values())


def covering_globs(names: set[str], every: Iterable[str]) -> list[str]:
    """Return globs such as `fig6-*` (or names) that match all of `names` and nothing else of `every`."""
    others = set(every) - names
    left, found = set(names), []
    while left:
        first = min(left)
        best = first
        for end in range(1, len(first) + 1):
            glob = f"{first[:end]}*"
            if not any(fnmatchcase(other, glob) for other in others):
                matched = {name for name in left if fnmatchcase(name, glob)}
                if len(matched) > 1:
                    best = f"{_common_prefix(matched)}*"
                break
        found.append(best)
        left -= {name for name in left if name == best or fnmatchcase(name, best)}
    return found


def _common_prefix(names: set[str]) -> str:
    """Return the longest common prefix of all names."""
    low, high = min(names), max(names)  # The prefix of the first and last sorted name is common to all names.
    same = [a == b for a, b in zip(low, high, strict=False)]
    return low[: same.index(False) if False in same else len(same)]
