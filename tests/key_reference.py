"""Print docs/keys.md: the keys of every kind of file, from the dataclasses that check the files.

python -m tests.key_reference > docs/keys.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from repro.claims import ledger
from repro.claims.formulas import FORMULAS
from repro.cli.commands.options import first_sentences
from repro.config import EmulatedNetwork, Layout, Limits, Model, Training
from repro.config.links import Link
from repro.config.quantity import Quantity
from repro.config.suites import Comparison
from repro.config.system import Device, System
from repro.config.timing import DeviceTime
from repro.results import metrics
from tests.command_reference import plain

HEAD = """# Keys of files

Every key of a suite, a model, a system and a ledger, from the definitions that check these files. A test compares this
page with the definitions. [Files of your own](own-files.md) begins with commented files.
"""


class Table(NamedTuple):
    title: str
    kind: type[Any]
    """Dataclass that checks the table."""
    explained: tuple[type[Any], ...] = ()
    """Further dataclasses whose fields of the same name explain the keys."""
    without: tuple[str, ...] = ()


TABLES = (
    Table("`layout` and `[layouts.NAME]` of a suite", Layout),
    Table("`training` of a suite", Training),
    Table("`limits` of a suite", Limits),
    Table("`[networks.NAME]` of a suite", EmulatedNetwork),
    Table("`[[compare]]` of a suite", Comparison),
    Table("A model, and `[models.NAME]` of a suite", Model),
    Table("A system", System, without=("name",)),
    Table("A number of a system", Quantity),
    Table("`[device]` of a system", Device),
    Table("`[device.time]` of a system", DeviceTime),
    Table("`[links.CLASS]` of a system: nvlink, pcie, inter-node", Link),
    Table("The top of a ledger file", ledger.FileEntry),
    Table("`[[source]]` of a ledger file", ledger.Source),
    Table("`[[claim]]`", ledger.ClaimEntry, (ledger.Claim,)),
    Table("`rows` of a claim", ledger.RowEntry, (ledger.Row, ledger.TestableEntry)),
    Table("`simulated`, `measured` and `emulated` of a row", ledger.EvidenceEntry, (ledger.Evidence,)),
)


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of a key as TOML has it, `required` without one, and nothing for empty values."""
    if field.default is field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default
    if value is dataclasses.MISSING or value in ("", None, ()) or isinstance(value, Quantity):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of one table."""
    sentences: dict[str, str] = {}
    for kind in (*table.explained, *table.kind.__mro__[1:-1], table.kind):
        sentences |= first_sentences(kind)
    yield from (f"\n## {table.title}\n", "| key | meaning | default |", "|---|---|---|")
    for field in dataclasses.fields(table.kind):
        if field.name not in table.without:
            yield f"| `{field.name}` | {plain(sentences.get(field.name, ''))} | {default_text(field)} |"


def function_lines() -> Iterator[str]:
    """Yield a table of the functions of an expression in a ledger file, and the list of metrics."""
    yield from ("\n## Functions of an expression in a ledger\n", "| function | value |", "|---|---|")
    for name, formula in FORMULAS.items():
        arguments = re.sub(r": '[a-z]+'| ->.*", "", str(inspect.signature(formula)))
        value = (inspect.getdoc(formula) or "").split("\n\n")[0].removeprefix("Return ")
        yield f"| `{name}{arguments}` | {plain(value)} |"
    yield "\n## Metrics of a record\n"
    yield "`metric(experiment, name)` reads a metric. The header of `repro export --table experiments --format csv` has"
    yield "the names of all metrics in the store.\n"
    yield (metrics.__doc__ or "").partition("\n\n")[2].rstrip()


def reference() -> str:
    """Return the page."""
    lines = [*(line for table in TABLES for line in table_lines(table)), *function_lines()]
    return "\n".join([HEAD.rstrip("\n"), *lines]) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
