"""Ranking of unknown inputs by the predicted rows that a measurement would settle.

Several unknowns move a predicted row of the ledger, one at a time (`InputUncertainty.alone`). An unknown settles a
row if it carries more than half of all moves: its measurement then removes more than half of the interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from repro.claims.verdicts import ClaimResult, Finding, RowResult
from repro.config.words import count_noun
from repro.measure.local_system import load_system
from repro.results.schema import ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import calibration_point_of, calibration_points, uncertain_numbers

CALIBRATE_NODE = "repro calibrate --system local-gpu --output FILE.toml"
CALIBRATE_CLUSTER = "repro calibrate --system {system} --profile SITE.toml --nodes 2 --output FILE.toml"


@dataclass(frozen=True)
class MeasurementAdvice:
    """Measurement of one unknown on a machine that has it."""

    command: str
    """Command of this suite; empty without one."""
    fact: str
    """Key of the system file that the command writes; empty without a command."""
    how: str
    """Content of that key; without a command the required measurement."""


OPERATORS = "seconds of every operator on the devices that are there, which need no pace then"
PRODUCTS = "the fastest product of all ranks at once; the peak is then what is reached"
COPIES = "a copy of four caches on all ranks at once; the bandwidth is then what is reached"
LINK = "collectives by size in every group of a layout, all groups at once, in place of the formula"
BESIDE = "products alone, and during a collective"
UNITS = "seconds of every operator on the devices that are there, in place of waves of tiles"
MEMORY = "what the driver says that the device has"
_MEASUREMENTS = (
    ("device.memory_bytes", "device.memory_bytes", MEMORY),
    ("device.time.multiprocessors", "device.operators", UNITS),
    ("device.time.unthrottled_efficiency", "device.operators", UNITS),
    ("device.time.pace", "device.operators", OPERATORS),
    ("device.time.spread", "", "the same products on every device of the cluster, each by itself"),
    ("device.time.matmul_efficiency", "device.peak_flops", PRODUCTS),
    ("device.peak_flops.*", "device.peak_flops", PRODUCTS),
    ("device.time.memory_efficiency", "device.memory_bandwidth", COPIES),
    ("device.memory_bandwidth", "device.memory_bandwidth", COPIES),
    ("device.time.kernel_s", "device.time.kernel_s", "an element-wise operator on no bytes"),
    ("device.time.fill_s", "device.operators", OPERATORS),
    ("device.time.launch_s", "device.time.launch_s", "a step that has nothing to compute, by operator"),
    ("links.pcie.bandwidth", "links.pcie.bandwidth", "pinned memory to all devices of a node at once"),
    ("links.inter-node.overlap_cost", "links.inter-node.overlap_cost", BESIDE),
    ("links.*.overlap_cost", "links.{link}.overlap_cost", BESIDE),
    ("links.inter-node.*", "links.inter-node.collectives", LINK),
    ("links.*", "links.{link}.collectives", LINK),
    ("*: operator_s", "device.time.launch_s", "a step that has nothing to compute, by operator"),
    ("*: attention", "device.operators", "seconds of every operator, attention among them"),
    ("*: passes", "device.operators", "seconds of every operator, passes over parameters among them"),
    ("*: products", "device.operators", "seconds of products and of every other operator, each by itself"),
    ("*: others", "device.operators", "seconds of every operator that is no product, each by itself"),
    ("*: FLOP/s", "", "the published run again with software of that time, its steps timed to three digits"),
    ("*", "", "a benchmark of it alone: repro calibrate takes it as it is"),
)
"""(pattern of keys, fact, how); the first matching pattern counts."""


def measurement_advice(key: str, system: str) -> MeasurementAdvice:
    """Return the measurement of the unknown `key` of `system`."""
    fact, how = next(entry[1:] for entry in _MEASUREMENTS if fnmatchcase(key, entry[0]))
    link = key.split(".")[1] if key.startswith("links.") else ""
    command = "" if not fact else CALIBRATE_CLUSTER if link == "inter-node" else CALIBRATE_NODE
    return MeasurementAdvice(command.format(system=system), fact.format(link=link), how)


LISTED_INPUTS = 5
"""Inputs of the short list."""
MIN_SETTLING_SHARE = 0.5
"""Share of a row's moves from which an unknown settles the row."""


@dataclass
class UncertainInput:
    """Unknown input and the rows that depend on it."""

    key: str
    """Key of the system file, `links.inter-node.rings`, or `NAME: FLOP/s` of a generation's published point."""
    system: str
    """System that has the input; for a generation the system of its published point."""
    low: float
    best: float
    high: float
    source: str
    rows: list[str] = field(default_factory=list)
    """`claim/label` of the rows that the input moves."""
    settles: list[str] = field(default_factory=list)
    """Rows that the input settles."""
    possible: list[str] = field(default_factory=list)
    """Rows with verdict `possible` on which the input decides, alone or as one of the two largest."""
    share: float = 0.0
    """Share of the moves of all uncertain rows with equal weights; the shares of all inputs add up to 1."""

    @property
    def measured_by(self) -> MeasurementAdvice:
        """Return the measurement of the input."""
        return measurement_advice(self.key, self.system)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        how = self.measured_by
        return {**vars(self), "command": how.command, "fact": how.fact, "how": how.how}


@dataclass(frozen=True)
class RankedInputs:
    """Unknown inputs in the order of their importance."""

    inputs: tuple[UncertainInput, ...]
    """Inputs, the one that settles most rows first."""
    rows: int
    """Rows with an uncertain predicted time."""
    possible: int
    """Uncertain rows whose verdict depends on unknown inputs."""

    @property
    def settled_by_the_first(self) -> int:
        """Return the number of rows that the listed inputs settle."""
        return len({row for one in self.inputs[:LISTED_INPUTS] for row in one.settles})

    @property
    def words(self) -> str:
        """Return a summary of the ranking."""
        return (
            f"Unknown inputs make the predicted times of {count_noun(self.rows, 'row')} uncertain. An input decides a "
            f"row if it has more than half of the effects of all inputs, each varied alone. The first {LISTED_INPUTS} "
            f"inputs decide {self.settled_by_the_first} rows. {self.possible} verdicts are `possible`."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        inputs = [one.as_dict() for one in self.inputs]
        return {"rows": self.rows, "possible": self.possible, "unknowns": inputs}


def format_range(one: UncertainInput) -> str:
    """Return value and range of an input, `1 [1, 8]`."""
    return f"{one.best:.4g} [{one.low:.4g}, {one.high:.4g}]"


def count_by_claim(rows: Sequence[str]) -> str:
    """Return the number of rows of each claim, `zero-fig2-throughput (12), ds-64gpu-table`."""
    counts = Counter(row.partition("/")[0] for row in rows)
    return ", ".join(f"{claim} ({count})" if count > 1 else claim for claim, count in counts.items())


def rank_inputs(judged: Iterable[ClaimResult], records: Iterable[Record]) -> RankedInputs:
    """Return the unknown inputs of the rows of `judged` that simulated `records` predict."""
    seen = simulated_records(records)
    found: dict[tuple[str, str], UncertainInput] = {}
    rows = [(row_name(result, row), finding) for result, row, finding in uncertain_rows(judged)]
    for row, finding in rows:
        assert finding.doubt is not None
        for key, share in finding.doubt.shares.items():
            for one in _inputs(key, finding, seen, found):
                one.rows.append(row)
                one.share += share / len(rows)
                if share > MIN_SETTLING_SHARE:
                    one.settles.append(row)
                if key in finding.deciding:
                    one.possible.append(row)
    ordered = sorted(found.values(), key=lambda one: (-len(one.settles), -one.share))
    return RankedInputs(tuple(ordered), len(rows), sum(bool(finding.deciding) for _, finding in rows))


def uncertain_rows(judged: Iterable[ClaimResult]) -> Iterator[tuple[ClaimResult, RowResult, Finding]]:
    """Yield every row with an uncertain predicted time, and its prediction."""
    for result in judged:
        for row in result.rows:
            finding = next((one for one in row.findings if one.doubt is not None), None)
            if finding is not None:
                yield result, row, finding


def row_name(result: ClaimResult, row: RowResult) -> str:
    """Return `claim/label`."""
    return f"{result.claim.id}/{row.row.label}"


def simulated_records(records: Iterable[Record]) -> dict[str, ExperimentRecord]:
    """Return the simulated records that count, by `suite/name`."""
    return {record.label: record for record in select(records).simulated if record.conclusive}


def _inputs(
    key: str,
    finding: Finding,
    seen: Mapping[str, ExperimentRecord],
    found: dict[tuple[str, str], UncertainInput],
) -> Sequence[UncertainInput]:
    """Return the input `key` of each system of a prediction: two systems if it compares two machines."""
    inputs: dict[str, UncertainInput] = {}
    for record in (seen[run] for run in finding.experiments):
        moves = record.interval.moves if record.interval is not None else []
        move = next((one for one in moves if one.key == key), None)
        if move is None:
            continue
        system = record.experiment.system
        whose = _POINTS[key].system if key in _POINTS else system
        if (key, whose) not in found:
            on = load_system(system)
            numbers = uncertain_numbers(on, calibration_point_of(record.experiment.layout.kernels, on))
            source = next((one.source for one in numbers if one.key == key), "")
            found[key, whose] = UncertainInput(key, whose, move.low, move.best, move.high, source)
        inputs[whose] = found[key, whose]
    return list(inputs.values())


_POINTS = {one.key: point for point in calibration_points() for one in point.unknowns}
