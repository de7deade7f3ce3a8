"""What a stage does in a row without anybody else: it takes the same whenever it begins, so it is gone through once.

A layer is some ten blocks with collectives of the tensor-parallel group between or beside them, and all layers and
micro-batches of a stage are alike.  Of a stretch that nothing else delays it is enough to count how often it came.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from repro.simulate.time.program import Await, Issue, Item, OperatorBlock

INSIDE = "tp"
"""The group whose collectives begin and end within a layer."""


@dataclass
class StageTime:
    """Where one stage's seconds of a step went."""

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The compute stream, by kind of operator."""
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """It waited for communication, by label."""
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """All communication, hidden or not, by label."""
    bubble: float = 0.0
    """It waited for another stage to compute."""
    end: float = 0.0
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """From the beginning of each forward pass, backward pass and update to its end, waits included."""

    def add(self, other: StageTime, times: int) -> None:
        """`other`, which came so many times."""
        self.bubble += times * other.bubble
        for mine, more in (
            (self.busy, other.busy),
            (self.exposed, other.exposed),
            (self.communication, other.communication),
        ):
            for name, seconds in more.items():
                mine[name] += times * seconds


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
