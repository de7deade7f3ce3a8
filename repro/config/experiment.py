"""An experiment: model x layout x training x system x engine; and its key, the name of its results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from repro.config import engines, spread
from repro.config.errors import ConfigError, require
from repro.config.layout import Layout
from repro.config.model import DEPARTURES, Model
from repro.config.network import EmulatedNetwork
from repro.config.operator_set import OperatorSet
from repro.config.sizes import TENSOR_BYTES, at_most
from repro.config.training import Training
from repro.config.twin import TwinOf

PROTOCOL = 2
"""Version of the measurement protocol; raised when a change makes older measurements not comparable."""
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
    """When a run is stopped.  Times in seconds, memory in bytes; 0 means no limit."""

    timeout_s: float = 600.0
    """Wall-clock limit of one launch."""
    hang_s: float = 60.0
    """A launch in which no rank makes progress for this long is a hang."""
    memory_bytes: int = 0
    """Limit on each rank's data memory (`RLIMIT_DATA`; on CUDA a fraction of the device)."""

    def __post_init__(self) -> None:
        for key in ("timeout_s", "hang_s", "memory_bytes"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 (no limit) or more")
        at_most("memory_bytes", self.memory_bytes, TENSOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One thing that can be run, simulated or computed."""

    name: str
    """Unique in its suite; what `--only` matches."""
    model: Model
    layout: Layout
    training: Training = field(default_factory=Training)
    system: str = "local"
    """Name of the system file; `local` is the machine at hand."""
    engine: str = engines.NATIVE
    """Who executes the strategy: see `repro.config.engines`."""
    limits: Limits = field(default_factory=Limits)
    network: EmulatedNetwork | None = None
    """What joins the ranks; None: the machine's own memory, or its own network."""
    twin: TwinOf | None = None
    """What it stands for, if it is a small twin of a published experiment."""

    def __post_init__(self) -> None:
        require(self.engine in engines.ENGINES, "engine", self.engine, f"one of {', '.join(engines.ENGINES)}")
        require(
            self.model.architecture == "gpt", "model", self.model.name, "a gpt; other models are only counted"
        )
        require(
            self.training.seq <= self.model.seq,
            "seq",
            self.training.seq,
            f"at most the model's {self.model.seq} positions",
        )
        try:
            spread.check(self.layout, self.model)
        except ConfigError as error:
            raise error.within(where="layout") from None
        at_most("bytes of a layer's largest tensor", self._largest_tensor(), TENSOR_BYTES)
        engines.check(self.engine, self.layout, self.training, self.model)
        self._check_sequence()

        if self.training.checkpoint_every and self.engine != engines.NATIVE:
            right = f"0 with engine {self.engine}, whose states only it knows"
            raise ConfigError("checkpoint_every", self.training.checkpoint_every, right, where="training")
        if self.network is not None:
            self._check_network(self.network)

    def _check_sequence(self) -> None:
        cp, tp = self.layout.cp, self.layout.tp
        require(
            cp == 1 or self.seq % (2 * cp) == 0,
            "seq",
            self.seq,
            f"a multiple of 2 cp = {2 * cp}, two chunks a rank",
        )
        ranks, names = (cp * tp, "cp x tp") if cp > 1 else (tp, "tp")
        require(
            not self.layout.sp or self.seq % ranks == 0,
            "seq",
            self.seq,
            f"a multiple of {names} = {ranks} under sp",
        )

    def _check_network(self, network: EmulatedNetwork) -> None:
        right = "local, or a file of `repro calibrate`, with a network, which joins processes of this machine"
        require(self.system == "local" or self.system.endswith(".toml"), "system", self.system, right)
        if network.world != self.layout.world:
            right = f"as many ranks as {' x '.join(self.layout.axes)} = {self.layout.world}"
            raise ConfigError("nodes x ranks_per_node", network.world, right, where="network")

    def _largest_tensor(self) -> int:
        """Bytes of it in fp32, of a micro-batch and before anything is split: activations, scores or a matrix."""
        model = self.model
        inner = (model.heads + 2 * model.key_heads) * model.head_width
        ffn, tokens = (model.mlp_matrices - 1) * model.ffn_width, self.layout.micro_batch * self.seq
        widest = max(inner, ffn, model.vocab, model.heads * self.seq)
        return 4 * max(tokens, model.hidden) * widest

    @property
    def seq(self) -> int:
        """Tokens per sample."""
        return self.training.seq or self.model.seq

    @property
    def course(self) -> dict[str, Any]:
        """All that decides the weights after each step, but for the order of sums: no layout, and no last step.

        Where it is equal, one experiment can go on from another's checkpoint.
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
        """Sixteen hex digits that name the results: equal conditions and protocol, equal key.

        The experiment's name, the limits on time, the model's remarks and `twin` do not change what is measured
        and are left out; a limit on memory does change it.  A field at its default is left out as well, so
        that an option that is added later, off by default, leaves the keys of older records as they are.
        Whoever changes what a default does, or its value, raises `PROTOCOL`.
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
        """Plain JSON data; `from_dict` is the way back.  Of a model's layer it names what is not as in GPT-2."""
        data, given = asdict(self), self.model.departures()
        data["model"] = {
            key: value for key, value in data["model"].items() if key in given or key not in DEPARTURES
        }
        return data


def _chosen(part: Model | Layout | Training, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of `part` that differ from their defaults; those without a default are always there."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part) if f.name not in without}
    return {
        name: value for name, (value, default) in values.items() if default is MISSING or value != default
    }


def _overlapped_before_it_was_said(operators: OperatorSet) -> bool:
    """What `tp_overlap` was before it was an option, when the operators decided it."""
    return not operators.writes_scores


def _chosen_layout(layout: Layout) -> dict[str, Any]:
    """The fields that an experiment's key names.

    Of `tp_overlap` it names what records older than the option cannot have run: they keep their keys, and no
    other experiment finds them.
    """
    chosen = _chosen(layout, without=("tp_overlap",))
    if layout.tp > 1 and layout.tp_overlap != _overlapped_before_it_was_said(layout.kernels):
        chosen["tp_overlap"] = layout.tp_overlap
    return chosen


def from_dict(data: dict[str, Any]) -> Experiment:
    """The experiment that `Experiment.as_dict` wrote, today or before some of the options existed."""
    layout = dict(data["layout"])
    if "tp_overlap" not in layout:
        operators = OperatorSet(layout.get("kernels", OperatorSet.FUSED))
        layout["tp_overlap"] = _overlapped_before_it_was_said(operators)
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
