"""Ranking of the uncertain inputs of predictions by the number of published values that a measurement would settle.

An input settles the prediction of a published value if it has more than half of the summed effects of all inputs, each
varied alone (`InputUncertainty.alone`). Its measurement then removes most of the prediction's interval.
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
    """Advice on how to measure one uncertain input of predictions on its system."""

    command: str
    """Command of this project that measures the input; empty if there is none."""
    fact: str
    """Key of the system file under which the command writes the measurement; empty without a command."""
    how: str
    """Description of the measurement."""


OPERATORS = "measured seconds of every operator on the system's devices, in place of assumed rates"
PRODUCTS = "the fastest matrix product on all ranks at once; its FLOP/s replace the data sheet's peak"
COPIES = "a copy of four times the cache size on all ranks at once; its rate replaces the data sheet's"
LINK = "measured seconds of collectives by payload, in all groups at once, in place of modelled seconds"
OVERLAP = "seconds of matrix products alone and during a collective"
UNITS = "measured seconds of every operator on the system's devices, in place of the model of GEMM tiles"
MEMORY = "the memory size that the driver reports"
_MEASUREMENTS = (
    ("device.memory_bytes", "device.memory_bytes", MEMORY),
    ("device.time.multiprocessors", "device.operators", UNITS),
    ("device.time.unthrottled_efficiency", "device.operators", UNITS),
    ("device.time.pace", "device.operators", OPERATORS),
    ("device.time.spread", "", "one matrix product on each device of the cluster in turn"),
    ("device.time.matmul_efficiency", "device.peak_flops", PRODUCTS),
    ("device.peak_flops.*", "device.peak_flops", PRODUCTS),
    ("device.time.memory_efficiency", "device.memory_bandwidth", COPIES),
    ("device.memory_bandwidth", "device.memory_bandwidth", COPIES),
    ("device.time.kernel_s", "device.time.kernel_s", "element-wise operators, extrapolated to 0 bytes"),
    ("device.time.fill_s", "device.operators", OPERATORS),
    ("device.time.launch_s", "device.time.launch_s", "host seconds per operator in a step of a tiny model"),
    ("links.pcie.bandwidth", "links.pcie.bandwidth", "copies from pinned memory to all devices at once"),
    ("links.inter-node.overlap_cost", "links.inter-node.overlap_cost", OVERLAP),
    ("links.*.overlap_cost", "links.{link}.overlap_cost", OVERLAP),
    ("links.inter-node.*", "links.inter-node.collectives", LINK),
    ("links.*", "links.{link}.collectives", LINK),
    ("*: operator_s", "device.time.launch_s", "host seconds per operator in a step of a tiny model"),
    ("*: FLOP/s", "", "a repetition of the published run, whose step time has three digits"),
    ("*: *", "device.operators", "seconds of every operator, each measured alone"),
    ("*", "", "a benchmark of this input alone, which repro calibrate does not contain"),
)
"""Measurements of uncertain inputs: (pattern of keys, key in the system file, description); the first match counts."""


def measurement_advice(key: str, system: str) -> MeasurementAdvice:
    """Return advice on how to measure the uncertain input `key` of `system`."""
    fact, how = next(entry[1:] for entry in _MEASUREMENTS if fnmatchcase(key, entry[0]))
    link = key.split(".")[1] if key.startswith("links.") else ""
    command = "" if not fact else CALIBRATE_CLUSTER if link == "inter-node" else CALIBRATE_NODE
    return MeasurementAdvice(command.format(system=system), fact.format(link=link), how)


LISTED_INPUTS = 5
"""Number of highest-ranked uncertain inputs that the summary names."""
MIN_SETTLING_SHARE = 0.5
"""Share of an input in the summed effects of all inputs on a prediction, above which the input settles it."""


@dataclass
class UncertainInput:
    """Uncertain input of predictions, and the published values whose predictions depend on it."""

    key: str
    """Key in the system file, such as `links.inter-node.rings`, or `RUN: FLOP/s` of a run that calibrates kernels."""
    system: str
    """System of the uncertain input; if the input is the FLOP/s of a run that calibrates kernels, that run's system."""
    low: float
    best: float
    high: float
    source: str
    rows: list[str] = field(default_factory=list)
    """Published values whose predictions depend on the input, as `claim/label`."""
    settles: list[str] = field(default_factory=list)
    """Published values in whose predictions the input has more than half of the summed effects of all inputs."""
    possible: list[str] = field(default_factory=list)
    """Published values that the best prediction misses but its interval contains, mainly due to this input."""
    share: float = 0.0
    """Mean share of the input in the effects on all uncertain predictions; the shares of all inputs add up to 1."""

    @property
    def measured_by(self) -> MeasurementAdvice:
        """Return the advice on how to measure the uncertain input."""
        return measurement_advice(self.key, self.system)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data of the uncertain input, the published values that depend on it, and its measurement."""
        how = self.measured_by
        return {**vars(self), "command": how.command, "fact": how.fact, "how": how.how}


@dataclass(frozen=True)
class RankedInputs:
    """Uncertain inputs of predictions, ranked by the number of published values whose verdict each input decides."""

    inputs: tuple[UncertainInput, ...]
    """Uncertain inputs, ordered by the number of published values whose verdict each input decides, largest first."""
    rows: int
    """Number of published values with an uncertain prediction."""
    possible: int
    """Number of published values that predictions miss, although the ranges of uncertain inputs contain them."""

    @property
    def settled_by_the_first(self) -> int:
        """Return the number of predictions whose uncertainty is mainly due to one of the first listed inputs."""
        return len({row for one in self.inputs[:LISTED_INPUTS] for row in one.settles})

    @property
    def words(self) -> str:
        """Return one paragraph that summarises the ranking of uncertain inputs."""
        return (
            f"Uncertain inputs make the predictions of {count_noun(self.rows, 'published value')} uncertain. An input "
            "decides a prediction if its effect is more than half of the sum of the inputs' single effects. The first "
            f"{LISTED_INPUTS} inputs decide {self.settled_by_the_first} predictions. "
            f"Published values with the verdict `possible`: {self.possible}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data of the ranking of uncertain inputs."""
        inputs = [one.as_dict() for one in self.inputs]
        return {"rows": self.rows, "possible": self.possible, "unknowns": inputs}


def format_range(one: UncertainInput) -> str:
    """Return best value and range of an uncertain input as text, such as `1 [1, 8]`."""
    return f"{one.best:.4g} [{one.low:.4g}, {one.high:.4g}]"


def count_by_claim(rows: Sequence[str]) -> str:
    """Return a list of claims with numbers of values as text, such as `zero-fig2-throughput (12), ds-64gpu-table`."""
    counts = Counter(row.partition("/")[0] for row in rows)
    return ", ".join(f"{claim} ({count})" if count > 1 else claim for claim, count in counts.items())


def rank_inputs(judged: Iterable[ClaimResult], records: Iterable[Record]) -> RankedInputs:
    """Return the ranking of the uncertain inputs on which predictions of the claims' published values depend."""
    seen = simulated_records(records)
    found: dict[tuple[str, str], UncertainInput] = {}
    rows = [(row_name(result, row), finding) for result, row, finding in uncertain_rows(judged)]
    for row, finding in rows:
        assert finding.uncertainty is not None
        for key, share in finding.uncertainty.shares.items():
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
    """Yield every published value with an uncertain prediction: results of claim and value, and the prediction."""
    for result in judged:
        for row in result.rows:
            finding = next((one for one in row.findings if one.uncertainty is not None), None)
            if finding is not None:
                yield result, row, finding


def row_name(result: ClaimResult, row: RowResult) -> str:
    """Return the name of a published value, `claim/label`."""
    return f"{result.claim.id}/{row.row.label}"


def simulated_records(records: Iterable[Record]) -> dict[str, ExperimentRecord]:
    """Return the records of simulated runs that claims use, by `suite/name`, without runs that ended in an error."""
    return {record.label: record for record in select(records).simulated if record.conclusive}


def _inputs(
    key: str,
    finding: Finding,
    seen: Mapping[str, ExperimentRecord],
    found: dict[tuple[str, str], UncertainInput],
) -> Sequence[UncertainInput]:
    """Return the uncertain input `key` for each system in a prediction; a ratio may compare two systems."""
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
