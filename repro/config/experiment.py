"""An experiment: model x layout x training x system x engine; and its key, the name of its results."""

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
"""Version of the measurement protocol; raised when a change makes older measurements incomparable."""
TWIN_RATIO = "FLOP/s of a device over the baseline's, predicted"
"""Name of the number that a twin reproduces."""
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
    """Limits of a run.  Times in seconds, memory in bytes; 0 means no limit."""

    timeout_s: float = 600.0
    """Wall-clock limit of one launch."""
    hang_s: float = 60.0
    """Time without progress of any rank after which a launch counts as a hang."""
    memory_bytes: int = 0
    """Limit on each rank's data memory (`RLIMIT_DATA`; on CUDA a fraction of the device)."""

    def __post_init__(self) -> None:
        at_least(self, ("timeout_s", "hang_s", "memory_bytes"), 0, "0 (no limit) or more")
        at_most("memory_bytes", self.memory_bytes, TENSOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class TwinOf:
    """Origin of a small twin, as `repro twin` writes it; the run does not depend on it."""

    original: str
    """Name of the published experiment."""
    part: float
    """Width of the twin over the width of the original, k."""
    between: float = 0.0
    """Bytes/s of a node's link to other nodes in the original; 0 on one node."""
    within: float = 0.0
    """Bytes/s of a device's link inside a node of the original."""
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """Dimensionless numbers (original, twin), predicted by the time model at the creation of the suite."""

    def __post_init__(self) -> None:
        pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in self.numbers.items()}
        object.__setattr__(self, "numbers", pairs)  # JSON has lists
        require(self.part > 0, "part", self.part, "more than 0")
        at_least(self, ("between", "within"), 0, "0 (none) or more")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training run that can be executed or simulated."""

    name: str
    """Name, unique in its suite; `--only` matches it."""
    model: Model
    layout: Layout
    training: Training = field(default_factory=Training)
    system: str = "local"
    """Name of the system file; `local` is the machine at hand."""
    engine: str = engines.NATIVE
    """Engine that executes the layout: see `repro.config.engines`."""
    limits: Limits = field(default_factory=Limits)
    network: EmulatedNetwork | None = None
    """Emulated network between the ranks; None means the machine's own memory or network."""
    twin: TwinOf | None = None
    """Origin of a small twin of a published experiment; None for other experiments."""

    def __post_init__(self) -> None:
        require(self.engine in engines.ENGINES, "engine", self.engine, f"one of {', '.join(engines.ENGINES)}")
        require(
            self.model.architecture == "gpt", "model", self.model.name, "a gpt; other models are only counted"
        )
        self.model.check_sequence(self.training.seq)
        try:
            engines.check_layout_fits(self.layout, self.model, self.seq)
        except ConfigError as error:
            raise error.within(where="layout") from None
        at_most("bytes of a layer's largest tensor", self._largest_tensor(), TENSOR_BYTES)
        engines.check_engine(self.engine, self.layout, self.training, self.model)
        chunks = 2 * self.layout.cp if self.layout.cp > 1 else 1
        require(self.seq % chunks == 0, "seq", self.seq, f"a multiple of 2 cp = {chunks}, two chunks a rank")
        require(
            not self.layout.cuda_graphs or self.training.untimed_steps > 1,
            "untimed_steps",
            self.training.untimed_steps,
            "at least 2 with cuda_graphs = true, whose graphs are captured in the second step",
        )
        if self.training.checkpoint_every and self.engine != engines.NATIVE:
            right = f"0 with engine {self.engine}, whose states only it knows"
            raise ConfigError("checkpoint_every", self.training.checkpoint_every, right, where="training")
        if self.network is not None:
            self._check_network(self.network)

    def _check_network(self, network: EmulatedNetwork) -> None:
        right = "local, or a file of `repro calibrate`, with a network, which joins processes of this machine"
        require(self.system == "local" or self.system.endswith(".toml"), "system", self.system, right)
        if network.world != self.layout.world:
            right = f"as many ranks as {' x '.join(self.layout.axes)} = {self.layout.world}"
            raise ConfigError("nodes x ranks_per_node", network.world, right, where="network")

    def _largest_tensor(self) -> int:
        """Return the fp32 bytes of the largest tensor of an undivided layer: activations, scores or a matrix."""
        model = self.model
        inner = (model.heads + 2 * model.key_heads) * model.head_width
        ffn, tokens = (model.mlp_matrices - 1) * model.ffn_width, self.layout.micro_batch * self.seq
        widest = max(inner, ffn, model.vocab, model.heads * self.seq)
        return 4 * max(tokens, model.hidden) * widest

    @property
    def seq(self) -> int:
        """Return the tokens per sample."""
        return self.training.seq or self.model.seq

    @property
    def course(self) -> dict[str, Any]:
        """Return the settings that determine the weights after each step, except the order of sums.

        Experiments with equal settings can continue from each other's checkpoints.
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
        """Return sixteen hex digits that name the results: equal conditions and protocol, equal key.

        The key omits the experiment's name, the limits on time, the model's remarks and `twin`, which do not change
        the measurement; a limit on memory does change it.  The key omits fields at their default too, so that a new
        option that is off by default does not change the keys of older records.  A change of a default's value or
        effect must raise `PROTOCOL`.
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
        """Return plain JSON data for `from_dict`.  The model contains only the layer's differences from GPT-2."""
        data, given = asdict(self), self.model.departures()
        data["model"] = {
            key: value for key, value in data["model"].items() if key in given or key not in DEPARTURES
        }
        return data


def _chosen(part: Model | Layout | Training, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of `part` that differ from their defaults, and the fields without a default."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part) if f.name not in without}
    return {
        name: value for name, (value, default) in values.items() if default is MISSING or value != default
    }


def _default_tp_overlap(operators: OperatorSet) -> bool:
    """Return `tp_overlap` of records without that option, in which the operators decided it."""
    return not operators.writes_scores


def _chosen_layout(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout in an experiment's key.

    `tp_overlap` is included only if it differs from the value in records without that option: their keys are fixed.
    """
    chosen = _chosen(layout, without=("tp_overlap",))
    if layout.tp > 1 and layout.tp_overlap != _default_tp_overlap(layout.kernels):
        chosen["tp_overlap"] = layout.tp_overlap
    return chosen


def from_dict(data: dict[str, Any]) -> Experiment:
    """Return the experiment of `Experiment.as_dict`, also of records without newer options."""
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
