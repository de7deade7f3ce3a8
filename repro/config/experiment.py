"""An experiment (model, layout, training, system and engine), and the key that identifies its results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from repro.config import engines
from repro.config.enums import OperatorSet
from repro.config.errors import ConfigError, require
from repro.config.layout import Layout
from repro.config.model import DEPARTURES, Model
from repro.config.network import EmulatedNetwork
from repro.config.sizes import TENSOR_BYTES, at_least, at_most
from repro.config.training import Training

PROTOCOL = 2
"""Version number of the measurement protocol. Every change that makes older measurements incomparable must raise it."""
TWIN_RATIO = "FLOP/s of a device over the baseline's, predicted"
"""Name of the dimensionless number that a scaled-down copy (twin) of a published experiment must reproduce."""
_REMARKS = ("published_name", "published_params", "source", "note")
_NOT_OF_THE_COURSE = (
    "steps",
    "untimed_steps",
    "seq",
    "decay_steps",
    "checkpoint_every",
    "continues",
    "deterministic",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time and memory limits of a training run; 0 means no limit."""

    timeout_s: float = 600.0
    """Wall-clock limit of one launch of the rank processes, in seconds."""
    hang_s: float = 60.0
    """Seconds without progress of any rank after which a launch counts as a hang."""
    memory_bytes: int = 0
    """Limit on the memory of each rank, in bytes: `RLIMIT_DATA`, or on CUDA a fraction of the device memory."""

    def __post_init__(self) -> None:
        at_least(self, ("timeout_s", "hang_s", "memory_bytes"), 0, "0 (no limit) or more")
        at_most("memory_bytes", self.memory_bytes, TENSOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class TwinOf:
    """Published experiment that a scaled-down experiment (its twin) reproduces. Written by `repro twin`."""

    original: str
    """Name of the published experiment that was scaled down."""
    part: float
    """Ratio k of the twin's model width to the model width of the published experiment."""
    between: float = 0.0
    """Bandwidth of a node's link to other nodes in the published experiment, in bytes/s; 0 on one node."""
    within: float = 0.0
    """Bandwidth of a device's link inside a node of the published experiment, in bytes/s."""
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """Dimensionless numbers by name, predicted by `repro twin`: pairs (published experiment, its scaled-down twin)."""

    def __post_init__(self) -> None:
        pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in self.numbers.items()}
        object.__setattr__(self, "numbers", pairs)  # JSON stores the pairs as lists, not as tuples
        require(self.part > 0, "part", self.part, "more than 0")
        at_least(self, ("between", "within"), 0, "0 (none) or more")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Configuration of one training run that can be executed or simulated."""

    name: str
    """Name of the experiment, unique in its suite; the option `--only` matches it."""
    model: Model
    layout: Layout
    training: Training = field(default_factory=Training)
    system: str = "local"
    """Hardware of the experiment: name of a packaged system or path of a system file; `local` is the local machine."""
    engine: str = engines.NATIVE
    """Training engine that executes the layout, a key of `repro.config.engines.ENGINES`."""
    limits: Limits = field(default_factory=Limits)
    network: EmulatedNetwork | None = None
    """Emulated network between the ranks; None: the ranks use the machine's shared memory or network directly."""
    twin: TwinOf | None = None
    """Published experiment that this experiment reproduces as a scaled-down twin; None for other experiments."""

    def __post_init__(self) -> None:
        require(self.engine in engines.ENGINES, "engine", self.engine, f"one of {', '.join(engines.ENGINES)}")
        right = "a model with architecture = gpt; of other models, only parameters are counted"
        require(self.model.architecture == "gpt", "model", self.model.name, right)
        self.model.check_sequence(self.training.seq)
        try:
            engines.check_layout_fits(self.layout, self.model, self.seq)
        except ConfigError as error:
            raise error.within(where="layout") from None
        at_most("bytes of a layer's largest tensor", self._largest_tensor(), TENSOR_BYTES)
        engines.check_engine(self.engine, self.layout, self.training, self.model)
        chunks = 2 * self.layout.cp if self.layout.cp > 1 else 1
        require(
            self.seq % chunks == 0, "seq", self.seq, f"a multiple of 2 cp = {chunks}, for two chunks per rank"
        )
        require(
            not self.layout.cuda_graphs or self.training.untimed_steps > 1,
            "untimed_steps",
            self.training.untimed_steps,
            "at least 2 with cuda_graphs = true, since the second step captures the graphs",
        )
        if self.training.checkpoint_every and self.engine != engines.NATIVE:
            right = f"0 with engine {self.engine}; only engine {engines.NATIVE} writes checkpoints"
            raise ConfigError("checkpoint_every", self.training.checkpoint_every, right, where="training")
        if self.network is not None:
            self._check_network(self.network)

    def _check_network(self, network: EmulatedNetwork) -> None:
        right = "local, or a file of `repro calibrate`, since an emulated network connects local processes"
        require(self.system == "local" or self.system.endswith(".toml"), "system", self.system, right)
        if network.world != self.layout.world:
            right = f"the number of ranks of the layout, {' x '.join(self.layout.axes)} = {self.layout.world}"
            raise ConfigError("nodes x ranks_per_node", network.world, right, where="network")

    def _largest_tensor(self) -> int:
        """Return the size of a layer's largest tensor (activations, scores or weights) in fp32 without tp, in bytes."""
        model = self.model
        inner = (model.heads + 2 * model.key_heads) * model.head_width
        ffn, tokens = (model.mlp_matrices - 1) * model.ffn_width, self.layout.micro_batch * self.seq
        widest = max(inner, ffn, model.vocab, model.heads * self.seq)
        return 4 * max(tokens, model.hidden) * widest

    @property
    def seq(self) -> int:
        """Return the sequence length: the number of tokens per training sample."""
        return self.training.seq or self.model.seq

    @property
    def course(self) -> dict[str, Any]:
        """Return the experiment's settings that determine the weights after each step, up to rounding.

        Experiments that agree in these settings can continue from each other's checkpoints.
        """
        training = _chosen(self.training, without=_NOT_OF_THE_COURSE)
        if self.training.schedule == "cosine":
            training["decay_steps"] = self.training.decay_steps or self.training.steps
        return {
            "model": _chosen(self.model, without=_REMARKS),
            "training": training,
            "seq": self.seq,
            "global_batch": self.layout.global_batch,
            "precision": self.layout.precision,
            "engine": self.engine,
        }

    @property
    def key(self) -> str:
        """Return sixteen hex digits that identify the experiment's results: a hash of its settings and `PROTOCOL`.

        The hash omits name, time limits, the model's remarks and `twin`, which do not affect a measurement. It also
        omits settings at their defaults, so that a new option does not change the keys of older records. A change of a
        default's value or effect must raise `PROTOCOL`.
        """
        content: dict[str, Any] = {
            "model": _chosen(self.model, without=_REMARKS),
            "layout": _chosen_layout(self.layout),
            "training": _chosen(self.training),
            "system": self.system,
            "engine": self.engine,
            "limits": {"memory_bytes": self.limits.memory_bytes},
            "protocol": PROTOCOL,
        }
        if self.network is not None:
            content["network"] = self.network.chosen()
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the experiment as JSON data for `from_dict`; layer variants (such as the norm) only if not GPT-2's."""
        data, given = asdict(self), self.model.departures()
        data["model"] = {
            key: value for key, value in data["model"].items() if key in given or key not in DEPARTURES
        }
        return data


def _chosen(part: Model | Layout | Training, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings of a model, layout or training that are not at their defaults, except those in `without`."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part) if f.name not in without}
    return {
        name: value for name, (value, default) in values.items() if default is MISSING or value != default
    }


def _default_tp_overlap(operators: OperatorSet) -> bool:
    """Return the `tp_overlap` of records without this key: true unless `operators` write attention scores to memory."""
    return not operators.writes_scores


def _chosen_layout(layout: Layout) -> dict[str, Any]:
    """Return the settings of a layout that belong to the hash that identifies an experiment.

    `tp_overlap` is included only if it differs from `_default_tp_overlap`, so that keys of older records stay valid.
    """
    chosen = _chosen(layout, without=("tp_overlap",))
    if layout.tp > 1 and layout.tp_overlap != _default_tp_overlap(layout.kernels):
        chosen["tp_overlap"] = layout.tp_overlap
    return chosen


def from_dict(data: dict[str, Any]) -> Experiment:
    """Return the experiment for JSON data of `Experiment.as_dict`, also for older records without recent options."""
    layout = dict(data["layout"])
    if "tp_overlap" not in layout:
        operators = OperatorSet(layout.get("kernels", OperatorSet.FUSED))
        layout["tp_overlap"] = _default_tp_overlap(operators)
    return Experiment(
        name=data["name"],
        model=Model(**data["model"]),
        layout=Layout(**layout),
        training=Training(**data["training"]),
        system=data["system"],
        engine=data["engine"],
        limits=Limits(**data["limits"]),
        network=EmulatedNetwork(**data["network"]) if data.get("network") else None,
        twin=TwinOf(**data["twin"]) if data.get("twin") else None,
    )
