"""Candidates of a layout search, the defaults of a layout's keys, and the memory limit of a device."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from repro.config import Experiment, Layout, Model, Training, engines, models
from repro.config.enums import OperatorSet
from repro.config.errors import ConfigError, require
from repro.config.layout import SELECTIVE
from repro.config.quantity import assumed_quantities
from repro.config.sizes import RANKS, at_most
from repro.config.system import System

DEFAULT_PLAN_ROWS = 7
"""Default number of layouts that a plan prints; `--json` prints all layouts."""
COST = "cost"
RANK_QUANTILES = {"median": 0.5, "p75": 0.75, "p95": 0.95, COST: 0.75}
"""Quantiles of the predicted step time, or of the training cost, by which a plan can order its first layouts."""
DEFAULT_RANK = "p75"
MIN_HEADROOM = 0.03
"""Share of a device's memory that should remain free. A plan lists layouts with less free memory after the others."""


@dataclass(frozen=True)
class LayoutQuery:
    """Options of a layout search as the user typed them. Invalid values raise a `ConfigError` that names the key."""

    system: str
    gpus: int
    layout: dict[str, Any]
    """Layout keys that the user gave; `software` names a published software whose settings apply to all layouts."""
    seq: int = 0
    """Tokens of a sample; 0 selects the model's maximum."""
    memory_limit: str = ""
    expandable: bool = False


_SIZE = re.compile(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*(?:([kmgt])(i?)b|b)?\s*", re.IGNORECASE)


def parse_memory_size(text: str) -> int | None:
    """Return the bytes that a text such as `32GB` (1e9 each), `32GiB` (2**30 each) or `16e9` denotes; None if empty."""
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number < 1e18:
        what = "a size in bytes: 32GB (1e9 each), 32GiB (2**30 each) or 16e9"
        raise ConfigError("memory_limit", text, what)
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    return int(number * (1024 if found[3] else 1000) ** power)


_COMMUNICATOR = {key: known.value or 0 for key, known in assumed_quantities("communicator").items()}


def communicator_bytes(layout: Layout, system: System) -> int:
    """Return the bytes of NCCL's communicator buffers on a device, beyond the communicator in `context_bytes`.

    The groups are those of `repro.parallel.mesh`: world, dp, cp, tp, pp, and the ends of a pipeline.
    """
    if "memory" in system.links:  # CPU systems have no NCCL.
        return 0
    axes = sum(size > 1 for size in (layout.copies, layout.tp, layout.pp))
    groups = axes + (axes > 1) + (layout.pp > 2) + (layout.cp > 1 and layout.dp > 1)
    return int(max(groups - 1, 0) * prod(_COMMUNICATOR.values()))


def is_tight(left: int, memory: int) -> bool:
    """Return whether `left` free bytes are less than `MIN_HEADROOM` of a device's `memory` in bytes."""
    return left < MIN_HEADROOM * memory


def device_memory_limit(system: System, given: int | None) -> int:
    """Return a device's memory in bytes: `given`, or else the system's value; `ConfigError` if both are unknown."""
    if given is None:
        known = system.device.memory_bytes
        if known.value is None:
            what = f"is needed, since the memory of {system.name} is not known ({known.source})"
            raise ConfigError("memory_limit", says=what)
        given = int(known.value)
    require(
        given > system.context(),
        "memory_limit",
        given,
        f"more than the {system.context()} bytes that CUDA and NCCL reserve on each device of {system.name}",
    )
    return given


def data_parallel_degree(gpus: int, tp: int, pp: int, cp: int = 1) -> int:
    """Return the data-parallel degree of a layout on `gpus` devices."""
    for key, degree in (("gpus", gpus), ("tp", tp), ("cp", cp), ("pp", pp)):
        require(degree >= 1, key, degree, "an integer of at least 1")
        at_most(key, degree, RANKS)
    one, times = tp * cp * pp, f"{tp} x {pp}" if cp == 1 else f"{tp} x {cp} x {pp}"
    names = "tp x pp" if cp == 1 else "tp x cp x pp"
    require(gpus % one == 0, "gpus", gpus, f"a multiple of {names} = {times} = {one}")
    return gpus // one


def complete_layout(given: dict[str, Any], gpus: int, system: System) -> Layout:
    """Return a full layout from the `given` keys; dp follows from `gpus`, precision and schedule have defaults.

    The default global batch is the smallest that fills the pipeline: micro_batch x dp x pp.
    """
    dp = data_parallel_degree(gpus, *(given.get(key, 1) for key in ("tp", "pp", "cp")))
    keys = engines.with_software(layout_defaults({**given, "dp": dp}, system))
    if not keys.get("global_batch"):
        keys["global_batch"] = keys.get("micro_batch", 1) * keys["dp"] * keys.get("pp", 1)
    return Layout(**keys)


def complete_experiment(model: str, query: LayoutQuery, system: System) -> Experiment:
    """Return the experiment of one step of `model` on `system`, with the user's layout keys. Raises `ConfigError`."""
    sizes, layout = models.load_model(model), complete_layout(query.layout, query.gpus, system)
    training = Training(seq=query.seq)
    return Experiment(name="simulate", model=sizes, layout=layout, training=training, system=system.name)


def layout_defaults(given: dict[str, Any], system: System) -> dict[str, Any]:
    """Return the `given` layout keys, with the defaults of precision and schedule if they are missing."""
    keys = {"precision": system.best_precision, **given}
    if keys.get("chunks", 1) > 1:
        keys.setdefault("schedule", "interleaved")
    return keys


SAMPLES_PER_GPU = 2
"""Default number of samples per GPU in the global batch of a plan."""
TOKENS_PER_RANK = 8192
"""Minimum number of tokens per rank in a plan that splits samples over context-parallel ranks (cp).

Llama 3 405B: cp = 1 for 8,192 tokens, cp = 16 for 131,072 (2407.21783 Table 4). The user can set a larger cp.
"""


@dataclass(frozen=True)
class PlanRequest:
    """Request for a layout search: model, system, number of GPUs, and the layout keys that have fixed values."""

    model: Model
    system: System
    gpus: int
    limit: int
    """Bytes of one device's memory, including the CUDA context."""
    seq: int
    """Tokens of a sample."""
    given: dict[str, Any] = field(default_factory=dict)
    """Layout keys with a fixed value. The search varies all other keys."""
    expandable: bool = False
    tokens: float = 0.0
    """Number of training tokens for which a plan reports duration and cost; 0 disables this report."""
    price_per_gpu_hour: float = 0.0
    """Price of a GPU hour in US dollars; 0 selects the price of the system, if known."""
    rank_by: str = DEFAULT_RANK
    """Key of `RANK_QUANTILES`."""

    @property
    def price(self) -> float | None:
        """Price of a GPU hour in US dollars; None if unknown."""
        return self.price_per_gpu_hour or self.system.device.price_per_hour.value

    @property
    def ranked_price(self) -> float:
        """Factor of a step time in the plan's sort order: price of a GPU hour if `rank_by` is `cost`, otherwise 1."""
        return (self.price or 1.0) if self.rank_by == COST else 1.0

    @property
    def allocatable(self) -> int:
        """Bytes of a device's memory less the CUDA context, including NCCL's buffers for further communicators."""
        return self.limit - self.system.context()

    @property
    def global_batch(self) -> int:
        """Number of samples in an optimizer step."""
        return int(self.given.get("global_batch") or SAMPLES_PER_GPU * self.gpus)


def candidates(request: PlanRequest) -> list[Layout]:
    """Return all candidate layouts of a plan without partitioned activations (P_a), which the search adds if needed.

    - tp: powers of two that divide heads, MLP and vocabulary and stay inside a node
    - cp: powers of two, for samples longer than `TOKENS_PER_RANK`
    - pp: divisors of the number of layers
    - dp: the remaining devices
    - ZeRO stages 0 to 3, or 0 to 2 with a pipeline
    - with and without recomputation and, under tp, sequence parallelism
    - micro-batches of powers of two that fill the pipeline

    Keys in `request.given` are fixed. Raises `ConfigError` if there is no layout at all.
    """
    given = layout_defaults(request.given, request.system)
    found: list[Layout] = []
    refused: list[ConfigError] = []
    training = Training(seq=request.seq)
    grid = [
        (tp, cp, pp)
        for tp in tensor_degrees(request)
        for cp in context_degrees(request, tp)
        for pp in pipeline_degrees(request, tp * cp)
    ]
    for tp, cp, pp in grid:
        for keys in _layout_keys(request, given, tp, cp, pp):
            try:
                layout = Layout(**keys)
                engines.check_layout_fits(layout, request.model, request.seq)
                engines.check_engine(engines.NATIVE, layout, training, request.model)
                found.append(layout)
            except ConfigError as error:  # The user's fixed layout keys may exclude this tp, cp or pp.
                refused.append(error)
    if not found and refused:
        raise refused[0]
    if not found:
        degrees = {request.gpus // (tp * cp * pp) for tp, cp, pp in grid}
        ranks = "tp x cp x pp" if any(cp > 1 for _, cp, _ in grid) else "tp x pp"
        if degrees and request.given.get("dp") not in {None, *degrees}:
            what = f"gpus / ({ranks}), which can be {', '.join(map(str, sorted(degrees)))}"
            raise ConfigError("dp", request.given["dp"], what)
        if degrees:
            possible = ", ".join(map(str, sorted(degrees)))
            what = f"a multiple of dp (one of {possible}) with at least pp micro-batches per replica"
            raise ConfigError("global_batch", request.global_batch, what)
        what = f"a multiple of {ranks} for degrees that divide the sizes of model {request.model.name}"
        raise ConfigError("gpus", request.gpus, what)
    return found


def tensor_degrees(request: PlanRequest) -> list[int]:
    """Return the candidate values of tp: the given one, or powers of two that divide the model and fit in a node."""
    data_parallel_degree(request.gpus, *(request.given.get(key, 1) for key in ("tp", "pp", "cp")))
    if "tp" in request.given:
        return [request.given["tp"]]
    per_node = request.system.devices_per_node.value
    if per_node is None or "memory" in request.system.links:
        per_node = request.gpus
    model, largest = request.model, int(min(request.gpus, per_node))
    return [
        tp
        for tp in (2**power for power in range(largest.bit_length()))
        if model.key_heads % tp == 0 or tp % model.key_heads == 0
        if all(size % tp == 0 for size in (model.heads, model.ffn_width, model.vocab))
    ]


def context_degrees(request: PlanRequest, tp: int) -> list[int]:
    """Return the candidate values of cp: the given one, or powers of two with `TOKENS_PER_RANK` tokens per rank."""
    given = request.given.get("cp")
    if given is not None:
        splits = given == 1 or request.seq % (2 * given) == 0
        require(splits, "cp", given, says=f"needs 2 cp = {2 * given} to divide seq = {request.seq}")
        return [given]
    if request.given.get("kernels") in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED):
        return [1]
    found, cp = [1], 2
    while request.seq >= cp * TOKENS_PER_RANK and request.seq % (2 * cp) == request.gpus % (tp * cp) == 0:
        found.append(cp)
        cp *= 2
    return found


def pipeline_degrees(request: PlanRequest, ranks: int) -> list[int]:
    """Return the candidate values of pp at tp x cp = `ranks`: the given one, or divisors of the layers and the GPUs."""
    if "pp" in request.given:
        return [request.given["pp"]]
    chunks = request.given.get("chunks", 1)
    layers = request.model.layers // chunks if request.model.layers % chunks == 0 else 0
    least = 2 if chunks > 1 or request.given.get("schedule") == "interleaved" else 1
    return [pp for pp in range(least, layers + 1) if layers % pp == 0 and request.gpus % (ranks * pp) == 0]


def _layout_keys(
    request: PlanRequest, given: dict[str, Any], tp: int, cp: int, pp: int
) -> list[dict[str, Any]]:
    """Return the layout keys of all candidates with the given degrees tp, cp and pp."""
    if request.gpus % (tp * cp * pp):
        return []
    dp = request.gpus // (tp * cp * pp)
    if request.global_batch % dp or dp != request.given.get("dp", dp):
        return []
    fixed = {**given, "tp": tp, "cp": cp, "pp": pp, "dp": dp, "global_batch": request.global_batch}
    writes_scores = OperatorSet(given.get("kernels", OperatorSet.FUSED)).writes_scores
    zero = [0] if dp * cp == 1 else [0, 1, 2] if pp > 1 else [0, 1, 2, 3]
    recompute = [False, SELECTIVE, True] if writes_scores and cp == 1 else [False, True]
    if "software" in given:
        software = engines.find_software(given["software"])
        zero = [stage for stage in zero if str(stage) in software.stages] or [int(min(software.stages))]
        # Software without sequence parallelism has no selective recomputation; 2205.05198 introduced both.
        if "sp" in software.layout:
            recompute = [False, True]
    replica = request.global_batch // dp
    # Exclude micro-batch sizes with which a replica has fewer micro-batches than pipeline stages.
    sizes = [2**power for power in range(replica.bit_length())]
    choices: dict[str, list[Any]] = {
        "zero": zero,
        "sp": [False, True] if tp > 1 and request.seq % (tp * cp) == 0 else [False],
        "recompute": recompute,
        "micro_batch": [size for size in sizes if replica % size == 0 and replica // size >= pp],
    }
    values = [[given[key]] if key in given else choices[key] for key in choices]
    found = ({**fixed, **dict(zip(choices, chosen, strict=True))} for chosen in product(*values))
    return [engines.with_software(keys) for keys in found]
