"""Choice of the experiments that `repro twin` scales down, and text of the suite file with their scaled-down twins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from repro.accuracy.calibrate.document import toml_key, toml_value
from repro.accuracy.twins.derive import Member, Twin
from repro.accuracy.twins.numbers import twin_of
from repro.claims.judge import experiments_read
from repro.claims.ledger import Claim
from repro.config import EmulatedNetwork, Experiment, Layout, Model
from repro.config.engines import NATIVE
from repro.config.errors import ConfigError, require
from repro.config.suites import Suite
from repro.config.systems import LOCAL_SYSTEMS


def claim_comparisons(claim: Claim, suites: dict[str, Suite]) -> list[list[Experiment]]:
    """Return the comparisons whose simulated runs test a claim; each is a list of experiments, the baseline first."""
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
        right = "a claim whose simulated experiments are in one [[compare]] table of a suite, or SUITE/EXPERIMENT names"
        raise ConfigError("CLAIM", claim.id, right)
    return found


def named_comparisons(names: Sequence[str], suites: dict[str, Suite]) -> list[list[Experiment]]:
    """Return the comparisons that the experiments `names` (`SUITE/NAME`) select.

    If every named experiment is the baseline of a comparison in its suite, the result is these comparisons. Otherwise,
    the experiments form one comparison whose baseline is the first.

    Raises:
        ConfigError: An experiment does not exist, or its system is not published.
    """
    found, compared = [], []
    for full in names:
        suite, _, name = full.partition("/")
        require(suite in suites, "SUITE/EXPERIMENT", full, f"a suite among {', '.join(suites)}")
        known = {entry.experiment.name: entry.experiment for entry in suites[suite].entries}
        require(name in known, "SUITE/EXPERIMENT", full, f"an experiment among {', '.join(known)}")
        found.append(known[name])
        row = next((row for row in suites[suite].comparisons if row.baseline == name), None)
        compared.append([known[other] for other in (name, *(row.subjects if row is not None else ()))])
    if all(len(members) > 1 for members in compared):
        return [_check_published(members) for members in compared]
    return [_check_published(found)]


def _check_published(members: list[Experiment]) -> list[Experiment]:
    """Return the experiments `members`; raise `ConfigError` if one of them runs on the local machine."""
    for experiment in members:
        if experiment.system in LOCAL_SYSTEMS:
            right = "an experiment on a system with a file, since a twin needs the predicted step time of its original"
            raise ConfigError("SUITE/EXPERIMENT", experiment.name, right)
    return members


ROUNDS = 3
HEAD = """# {title}
#
#     repro twin {arguments}
#     repro run {file}
#
# The first command wrote this file. The rates of the networks hold for ranks that compute at `flops_per_s`, as measured
# on {machine}; `repro run` scales them to the rate of its machine (docs/twins.md).
"""


@dataclass(frozen=True)
class NamedTwin:
    """Scaled-down twin of a comparison, and the suffix of its experiments' names in a suite file."""

    twin: Twin
    ending: str = ""


def suite_text(
    twins: Sequence[NamedTwin], *, file: str, name: str, arguments: str, claims: Sequence[str]
) -> str:
    """Return the TOML text of a suite `name` with `twins`; its comment quotes `file` and the `repro twin` arguments."""
    first = twins[0].twin.members[0]
    originals = list(dict.fromkeys(m.original.name for named in twins for m in named.twin.members))
    title = f"Small twins of {', '.join(originals)} on emulated networks."
    machine = f"{first.machine.device.name} with {first.twin.layout.world} ranks"
    lines = [HEAD.format(title=title, arguments=arguments, file=file, machine=machine)]
    head = {"name": name, "description": title.rstrip("."), "claims": list(claims)}
    lines += _table("[suite]", {key: value for key, value in head.items() if value})
    # The suite expects no outcome (`expect`), because runs fail if a busy machine cannot reach the emulated link rates.
    lines += _table("[defaults]", {"expect": ""})
    lines += _table("[defaults.limits]", {"timeout_s": 1800, "hang_s": 300})
    models: dict[str, Model] = {}
    for named in twins:
        for member in named.twin.members:
            models.setdefault(member.twin.model.name, member.twin.model)
    for model in models.values():
        lines += _table(f'[models."{model.name}"]', _chosen(model, without=("name",)))
    for named in twins:
        lines += _twin(named)
    return "\n".join(lines).rstrip("\n") + "\n"


def _twin(named: NamedTwin) -> list[str]:
    lines, twin = [], named.twin
    names = [member.original.name + named.ending for member in twin.members]
    for reason in twin.unlimited:
        lines.append(f"# {reason}; this link has no rate limit.")
    networks: dict[EmulatedNetwork, str] = {}
    for i, member in enumerate(twin.members):
        if member.network not in networks:
            lines += _table(f'[networks."{names[i]}"]', member.network.chosen())
        network = networks.setdefault(member.network, names[i])
        layout = _chosen(member.twin.layout)
        training = {"steps": member.twin.training.steps, "untimed_steps": member.twin.training.untimed_steps}
        table = {"name": names[i], "model": member.twin.model.name, "network": network}
        if member.twin.engine != NATIVE:
            table["engine"] = member.twin.engine
        lines += _table("[[experiment]]", {**table, "layout": layout, "training": training})
        lines += _stands_for(member, twin.members[0])
    together = [member.original.name + named.ending for member in twin.together]
    if len(together) > 1:
        lines += _table("[[compare]]", {"baseline": together[0], "subjects": together[1:], "rounds": ROUNDS})
    return lines


def _stands_for(member: Member, baseline: Member) -> list[str]:
    found = twin_of(member, baseline)
    links = {"between": found.between, "within": found.within}
    head = {"original": found.original, "part": found.part}
    head |= {key: rate for key, rate in links.items() if rate}
    return _table("[experiment.twin]", head) + _table("[experiment.twin.numbers]", found.numbers)


def _chosen(part: Model | Layout, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a model or layout that differ from their defaults, by field name."""
    found = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in without and (field.default is MISSING or value != field.default):
            found[field.name] = value
    return found


def _table(header: str, table: Mapping[str, Any]) -> list[str]:
    return [header, *(f"{toml_key(key)} = {toml_value(value, _number)}" for key, value in table.items()), ""]


def _number(value: int | float) -> str:
    return f"{value:_}" if isinstance(value, int) else f"{value:.4g}"
