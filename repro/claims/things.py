"""How many independent things a judged ledger tests, where its cells are many times one formula.

A test is what one finding reads.  A closed form or a count reads its functions; the one formula of model-state bytes,
which three functions evaluate, is one thing however many cells it fills.  Traces and runs read what sizes alone decide
(bytes of states, calls, bytes sent), each one thing by its name, or what comes out of a layout as a whole (time, what
fits, the largest memory, a loss), one thing for each experiment, or
for each score of weights.  What a library was seen to do is apart from ours.
The source against itself is one thing for each expression of a claim.

Tests are taken with the fewest things read first, and one counts if it reads something that no counted test has read:
of the rates of two runs and their ratio, two count, and any number of rates, times and shares of one run is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from repro.claims.expression import arguments, parse
from repro.claims.inputs import EVALUATED, PAPERS
from repro.claims.ledger import ITSELF, KINDS
from repro.claims.results import GOOD, NOT_COMPARABLE, POSSIBLE, ClaimResult, Finding, RowResult
from repro.claims.scripts import COUNTS

Thing = tuple[str, ...]
SAME = {"max_params": "model_state_bytes", "memory_reduction": "model_state_bytes"}
"""Functions that evaluate the formula of another."""
STATES = ("states", "parameters", "gradients", "optimizer")
BY_LAYOUT = ("peak", "reserved", "used", "activations", "allocated", "cached")
"""`memory.X_bytes` that no formula of sizes gives."""
CHOOSE = ("outcome", "failure", "largest", "smallest")
CURVES = ("strayed", "apart")
"""Of the experiment that they name first; the others are what it is held against."""


FAILS, OPEN, HOLDS = range(3)
"""What the worst of the cells that read the same comes to."""


@dataclass(frozen=True)
class Things:
    """Independent things of one kind of evidence."""

    tested: int
    hold: int
    """All cells that read just these agree."""
    possible: int = 0
    """All agree or lie in what unknown inputs leave."""


def count(results: Sequence[ClaimResult], possible: bool = False) -> dict[str, Things]:
    """By kind of evidence, and under `ledger.ITSELF`, which none of these has.

    `possible`: whatever could be tested, run or not; what is not run does not hold.
    """
    groups: dict[str, dict[frozenset[Thing], int]] = {name: {} for name in (*KINDS, ITSELF)}
    for result in results:
        for row in result.rows:
            for finding in row.findings:
                if finding.decided or (possible and NOT_COMPARABLE not in (row.verdict, finding.verdict)):
                    of = groups[ITSELF if finding.itself else finding.kind]
                    read = frozenset(reads(finding, row, result))
                    holds = (
                        HOLDS if finding.verdict in GOOD else OPEN if finding.verdict == POSSIBLE else FAILS
                    )
                    of[read] = min(of.get(read, holds), holds)
    return {name: _independent(found) for name, found in groups.items()}


def _independent(groups: dict[frozenset[Thing], int]) -> Things:
    seen: set[Thing] = set()
    counted: list[int] = []
    for read, holds in sorted(groups.items(), key=lambda item: (len(item[0]), sorted(item[0]))):
        if not read <= seen:
            counted.append(holds)
            seen |= read
    return Things(len(counted), counted.count(HOLDS), counted.count(OPEN))


def reads(finding: Finding, row: RowResult, result: ClaimResult) -> Iterable[Thing]:
    """What the value of `finding` comes from."""
    if finding.itself:
        return [(result.claim.id, finding.expression)]
    expression = parse(finding.expression)
    if finding.kind == "analytic":
        return [(SAME.get(name, name),) for name in expression.calls & (PAPERS | COUNTS.keys())]
    found: list[Thing] = []
    for function, texts in arguments(expression, row.row.variables):
        experiments = [text for text in texts if "/" in text]
        if function in CHOOSE:
            found += [("fits", name) for name in experiments]
        elif function == "compared":
            found += [("time", name) for name in experiments]
        elif function in CURVES:
            found.append(("loss", experiments[0]))
        elif function == EVALUATED:
            found.append(("score", *texts))
        elif function == "metric" and len(texts) == 2 and not texts[1].startswith("model."):
            found.append(_thing(*texts))
    return [(*thing, *finding.libraries) for thing in found] or [(finding.expression,)]


def _thing(experiment: str, metric: str) -> Thing:
    """What a metric of an experiment is one of the names of."""
    area, _, rest = metric.partition(".")
    if area == "memory":
        part = rest.removesuffix("_bytes")
        return (area, part, experiment) if part in BY_LAYOUT else (area, "states" if part in STATES else part)
    if area in ("comm", "flops"):
        return (metric,)
    timed = area.endswith(("_per_s", "seconds"))
    return ("time" if timed else metric, experiment)
