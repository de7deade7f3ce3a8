"""Every sensible layout of a model on a number of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from repro.config import Layout, Model
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.simulate.plan.asked import replicas, with_defaults

SAMPLES_PER_GPU = 2
"""Global batch of a plan that is given none, per GPU."""


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    model: Model
    system: System
    gpus: int
    limit: int
    """Bytes of one device's memory, context included."""
    seq: int
    """Tokens of a sample."""
    given: dict[str, Any] = field(default_factory=dict)
    """Keys of the layout that are fixed."""
    expandable: bool = False
    tokens: float = 0.0
    """Of a whole training, to say how long it takes; 0: not asked."""
    price_per_gpu_hour: float = 0.0
    """In any currency; 0: not asked."""

    @property
    def allocatable(self) -> int:
        """Bytes that the allocator of one device can have."""
        return self.limit - self.system.context()

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return int(self.given.get("global_batch") or SAMPLES_PER_GPU * self.gpus)


def candidates(request: Request) -> list[Layout]:
    """All of them, but for P_a, which is tried where it is needed.

    tp: powers of two that divide heads, MLP and vocabulary and stay inside a node; pp: divisors of the layers;
    dp: the rest; ZeRO 0 to 3 (to 2 under a pipeline); with and without recomputation and, with tp, sequence
    parallelism; micro-batches of powers of two that keep a pipeline full.  A key that is given is taken as it
    is.  Raises `ConfigError` if there is no layout at all.
    """
    given = with_defaults(request.given, request.system)
    found: list[Layout] = []
    refused: list[ConfigError] = []
    for tp in tensor_degrees(request):
        for pp in stages(request, tp):
            for keys in _of_grid(request, given, tp, pp):
                try:
                    layout = Layout(**keys)
                    layout.check(request.model)
                    found.append(layout)
                except ConfigError as error:  # what is fixed need not go with all that is varied
                    refused.append(error)
    if not found and refused:
        raise refused[0]
    if not found:
        degrees = {request.gpus // (tp * pp) for tp in tensor_degrees(request) for pp in stages(request, tp)}
        if degrees and request.given.get("dp") not in {None, *degrees}:
            what = f"gpus / (tp x pp), which can be {', '.join(map(str, sorted(degrees)))}"
            raise ConfigError("dp", request.given["dp"], what)
        if degrees:
            what = f"a multiple of dp, which can be {', '.join(map(str, sorted(degrees)))}, with pp micro-batches each"
            raise ConfigError("global_batch", request.global_batch, what)
        what = f"a multiple of tp x pp for some split of {request.model.name}"
        raise ConfigError("gpus", request.gpus, what)
    return found


def tensor_degrees(request: Request) -> list[int]:
    """The tp of a plan: what is given, or powers of two that divide the model and stay inside a node."""
    replicas(request.gpus, request.given.get("tp", 1), request.given.get("pp", 1))
    if "tp" in request.given:
        return [request.given["tp"]]
    per_node = request.system.devices_per_node.value
    if per_node is None or "memory" in request.system.links:
        per_node = request.gpus
    model, found, tp = request.model, [], 1
    while tp <= min(request.gpus, per_node):
        keys = model.key_heads
        shared = keys % tp == 0 or tp % keys == 0
        if shared and all(size % tp == 0 for size in (model.heads, model.ffn_width, model.vocab)):
            found.append(tp)
        tp *= 2
    return found


def stages(request: Request, tp: int) -> list[int]:
    """The pp of a plan beside `tp`: what is given, or the divisors of the layers that divide the GPUs."""
    if "pp" in request.given:
        return [request.given["pp"]]
    chunks = request.given.get("chunks", 1)
    layers = request.model.layers // chunks if request.model.layers % chunks == 0 else 0
    least = 2 if chunks > 1 or request.given.get("schedule") == "interleaved" else 1
    return [pp for pp in range(least, layers + 1) if layers % pp == 0 and request.gpus % (tp * pp) == 0]


def _of_grid(request: Request, given: dict[str, Any], tp: int, pp: int) -> list[dict[str, Any]]:
    """The keys of all layouts of one tp and pp."""
    if request.gpus % (tp * pp):
        return []
    dp = request.gpus // (tp * pp)
    if request.global_batch % dp or dp != request.given.get("dp", dp):
        return []
    fixed = {**given, "tp": tp, "pp": pp, "dp": dp, "global_batch": request.global_batch}
    choices: dict[str, list[Any]] = {
        "zero": [0] if dp == 1 else [0, 1, 2] if pp > 1 else [0, 1, 2, 3],
        "sp": [False, True] if tp > 1 and request.seq % tp == 0 else [False],
        "recompute": [False, True],
        "micro_batch": _micro_batches(request.global_batch // dp, pp),
    }
    values = [[given[key]] if key in given else choices[key] for key in choices]
    return [{**fixed, **dict(zip(choices, chosen, strict=True))} for chosen in product(*values)]


def _micro_batches(replica: int, pp: int) -> list[int]:
    """Powers of two that divide a replica's batch and leave enough of them to fill the pipeline."""
    found, size = [], 1
    while replica % size == 0 and replica // size >= pp:
        found.append(size)
        size *= 2
    return found
