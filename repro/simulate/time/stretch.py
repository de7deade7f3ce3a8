"""What a stage does in a row without anybody else: it takes the same whenever it begins, so it is gone through once.

A layer is some ten blocks with collectives of the tensor-parallel group between or beside them, and all layers and
micro-batches of a stage are alike.  Of a stretch that nothing else delays it is enough to count how often it came.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from repro.simulate.time.account import StageTime
from repro.simulate.time.program import Await, Issue, Item, OperatorBlock

INSIDE = "tp"
"""The group whose collectives begin and end within a layer."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """Items in a row that take the same seconds whenever they begin, unless the group is busy then."""

    items: Sequence[Item]
    seconds: float
    keys: frozenset[tuple[object, ...]]
    """Of its collectives."""
    time: StageTime


def parts(items: Sequence[Item]) -> Iterator[tuple[bool, list[Item]]]:
    """`items` cut into those that are a stretch (True) and the others, in their order."""
    matched = _matched(items)
    part: list[Item] = []
    open_, whole = 0, 0
    for at, item in enumerate(items):
        if not isinstance(item, OperatorBlock) and at not in matched:
            yield True, part[:whole]
            yield False, [*part[whole:], item]
            part, open_, whole = [], 0, 0
            continue
        part.append(item)
        open_ += isinstance(item, Issue) - isinstance(item, Await)
        if open_ == 0:
            whole = len(part)
    yield True, part[:whole]
    yield False, part[whole:]


def _matched(items: Sequence[Item]) -> set[int]:
    """Where collectives of the inner group begin that are waited for among `items`, and where they are."""
    under_way: dict[tuple[object, ...], list[int]] = defaultdict(list)
    leaving = Counter(item.key for item in items if isinstance(item, Issue) and item.group == INSIDE)
    leaving.subtract(item.key for item in items if isinstance(item, Await))
    found: set[int] = set()
    for at, item in enumerate(items):
        if isinstance(item, Issue) and item.group == INSIDE and not leaving[item.key]:
            under_way[item.key].append(at)
        elif isinstance(item, Await) and under_way[item.key]:
            found |= {under_way[item.key].pop(0), at}
    return found
