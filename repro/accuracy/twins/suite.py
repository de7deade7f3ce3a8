"""Twins as a suite: what `repro twin --write` writes and `repro run` runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from repro.accuracy.twins.derive import Member, Twin
from repro.accuracy.twins.numbers import twin_of
from repro.config import EmulatedNetwork, Layout, Model
from repro.config.engines import NATIVE

ROUNDS = 3
HEAD = """# {title}
#
#     repro twin {arguments}
#     repro run {file}
#
# Written by the first line; the rates of the networks keep the numbers of the originals where ranks compute at
# `flops_per_s`, as those of {machine} do; elsewhere they are scaled (docs/twins.md).
"""


@dataclass(frozen=True)
class Named:
    """One twin of a file, and what its experiments' names end with."""

    twin: Twin
    ending: str = ""


def text(twins: Sequence[Named], *, file: str, name: str, arguments: str, claims: Sequence[str]) -> str:
    """The suite called `name` as TOML; `file`: where it will be; `arguments`: of the command that made it."""
    first = twins[0].twin.members[0]
    originals = list(dict.fromkeys(m.original.name for named in twins for m in named.twin.members))
    title = f"Small twins of {', '.join(originals)} on emulated networks."
    machine = f"{first.machine.device.name}, {first.twin.layout.world} ranks,"
    lines = [HEAD.format(title=title, arguments=arguments, file=file, machine=machine)]
    head = {"name": name, "description": title.rstrip("."), "claims": list(claims)}
    lines += _table("[suite]", {key: value for key, value in head.items() if value})
    # Where something else computes, links and ranks miss their rates: that run is refused, and the suite not to blame.
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


def _twin(named: Named) -> list[str]:
    lines, twin = [], named.twin
    names = [member.original.name + named.ending for member in twin.members]
    for said in twin.unlimited:
        lines.append(f"# {said}; that link is as fast as the machine is.")
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
    head = {
        "original": found.original,
        "part": found.part,
        **{key: rate for key, rate in links.items() if rate},
    }
    pairs = {json.dumps(name, ensure_ascii=False): pair for name, pair in found.numbers.items()}
    return _table("[experiment.twin]", head) + _table("[experiment.twin.numbers]", pairs)


def _chosen(part: Model | Layout, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    found = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in without and (field.default is MISSING or value != field.default):
            found[field.name] = value
    return found


def _table(header: str, table: dict[str, Any]) -> list[str]:
    return [header, *(f"{key} = {_value(value)}" for key, value in table.items()), ""]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, (bool, str)):
        return json.dumps(str(value) if isinstance(value, str) else value, ensure_ascii=False)
    return f"{value:_}" if isinstance(value, int) else f"{value:.4g}"
