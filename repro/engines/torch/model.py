"""The suite's GPT built from torch.nn modules, and conversion of its parameters to those of `repro.model.gpt.GPT`.

Symbols: b samples, s tokens, h hidden, a heads of width d. Only the rows of the `qkv` matrix differ: the suite stores
query, key and value matrices [3, a d, ...], and this module stores those of each head together, [a 3 d, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from repro import kernels
from repro.config import Experiment, Layout, Model, OperatorSet, Training
from repro.engines.native.model_part import MicroBatch
from repro.model.gpt import GPT, BatchPosition, Part, initial_values
from repro.model.operator_sets import WeightDropout, attend
from repro.parallel import mesh as meshes


@dataclass(frozen=True)
class Dropout:
    """Dropout for torch modules that drops equal elements under every layout, unlike torch's own dropout.

    `first_position` and `first_head`: first position of the sequence, and first attention head, on this rank.
    """

    training: Training
    model: Model
    seq: int
    first_position: int = 0
    first_head: int = 0

    def key(self, place: BatchPosition, layer: int, site: int) -> int:
        """Return the random number key of dropout number `site` in a layer, at training step `place.step`."""
        return kernels.derive_key(self.training.seed, place.step, layer, site)

    def residual(self, x: Tensor, place: BatchPosition, layer: int, site: int) -> Tensor:
        """Return x [b, s, h] after dropout number `site` of a layer."""
        p = self.training.dropout
        if not p:
            return x
        key = self.key(place, layer, site)
        return kernels.bias_dropout_residual(
            x, None, None, p, key, place.first_sample, self.seq, self.first_position, True
        )

    def weights(self, place: BatchPosition, layer: int) -> WeightDropout | None:
        """Return the dropout of attention weights in a layer; None if the probability is 0."""
        p = self.training.attention_dropout
        if not p:
            return None
        key = self.key(place, layer, 0)
        return WeightDropout(p, key, place.first_sample, self.model.heads, self.first_head)


class PlainEmbedding(nn.Module):
    """Embedding layer: sum of token and position embeddings, then dropout; [b, s] to [b, s, h]."""

    def __init__(self, model: Model, dropout: Dropout):
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Embedding(model.seq, model.hidden)

    def forward(self, tokens: Tensor, place: BatchPosition) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout.residual(self.tokens(tokens) + self.positions(positions), place, 0, 0)


class PlainAttention(nn.Module):
    """Attention sublayer with causal mask: x + dropout(attend(norm(x)))."""

    def __init__(self, model: Model, dropout: Dropout, layer: int):
        super().__init__()
        inner = model.heads * model.head_width
        self.dropout, self.layer, self.width = dropout, layer, model.head_width
        self.norm = nn.LayerNorm(model.hidden)
        # Rows are ordered by head (query, key, value), so that a split by rows gives a rank complete heads.
        self.qkv = nn.Linear(model.hidden, 3 * inner)
        self.out = nn.Linear(inner, model.hidden)

    def forward(self, x: Tensor, place: BatchPosition) -> Tensor:
        y = self.qkv(self.norm(x))
        b, s, _ = y.shape
        # queries, keys and values, each [b, a, s, d]
        q, k, v = y.view(b, s, -1, 3, self.width).transpose(1, 2).unbind(3)
        drop = self.dropout.weights(place, self.layer)
        if drop is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attend(OperatorSet.REFERENCE, q, k, v, drop, None)
        y = self.out(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.dropout.residual(y, place, self.layer, 1)


class PlainMlp(nn.Module):
    """MLP sublayer of a transformer layer: x + dropout(mlp(norm(x)))."""

    def __init__(self, model: Model, dropout: Dropout, layer: int):
        super().__init__()
        self.dropout, self.layer = dropout, layer
        self.norm = nn.LayerNorm(model.hidden)
        self.up = nn.Linear(model.hidden, model.ffn_width)
        self.down = nn.Linear(model.ffn_width, model.hidden)

    def forward(self, x: Tensor, place: BatchPosition) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return x + self.dropout.residual(y, place, self.layer, 2)


class PlainBlock(nn.Module):
    """Transformer layer of torch.nn modules, whose activations are recomputed in backward if `recompute`."""

    def __init__(self, model: Model, dropout: Dropout, layer: int, *, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.attention = PlainAttention(model, dropout, layer)
        self.mlp = PlainMlp(model, dropout, layer)

    def forward(self, x: Tensor, place: BatchPosition) -> Tensor:
        if not self.recompute:
            return self._layer(x, place)
        # Random numbers are functions of counters, so there is no generator state to save.
        y: Tensor = checkpoint(self._layer, x, place, use_reentrant=False, preserve_rng_state=False)
        return y

    def _layer(self, x: Tensor, place: BatchPosition) -> Tensor:
        y: Tensor = self.mlp(self.attention(x, place), place)
        return y


class Head(nn.Module):
    """Head of the GPT: final norm, logits and mean cross-entropy, from x [b, s, h] and targets [b, s] to 0-dim."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainGPT(nn.Module):
    """GPT of torch.nn modules, or a stage's part, from tokens [b, s] or x [b, s, h] to x or the mean loss."""

    def __init__(
        self,
        model: Model,
        dropout: Dropout,
        part: Part,
        *,
        recompute: bool,
        autocast: torch.dtype | None = None,
    ):
        """Create a part of the model. `autocast`: data type of matrix products under autocast, with fp32 parameters."""
        super().__init__()
        self.part, self.autocast = part, autocast
        self.batches: Iterator[MicroBatch] = iter(())
        """Iterator over micro-batches, which supply targets and positions, since torch's pipeline passes only x."""
        if part.first:
            self.embed = PlainEmbedding(model, dropout)
        self.blocks = nn.ModuleDict(
            {str(i): PlainBlock(model, dropout, i + 1, recompute=recompute) for i in part.layers}
        )
        if part.last:
            self.head = Head(model)
        self.tie()

    def tie(self) -> None:
        """Tie the token embedding and the output matrix of the logits, if this part of the model has both."""
        if self.part.first and self.part.last:
            self.head.output.weight = self.embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        batch = next(self.batches)
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            if self.part.first:
                x = self.embed(x, batch.place)
            for block in self.blocks.values():
                x = block(x, batch.place)
            return self.head(x, batch.targets) if self.part.last else x


def suite_name(name: str) -> str:
    """Return the name in this suite's GPT of a parameter `name` of the torch.nn GPT."""
    if name == "head.output.weight":
        return "embed.tokens"
    module, _, kind = name.rpartition(".")
    return module if kind == "weight" else f"{module}_{kind}"


def to_plain(name: str, value: Tensor, model: Model) -> Tensor:
    """Return `value` of the parameter `name` of this suite's GPT in the shape that the torch.nn GPT stores."""
    if ".qkv" not in name:
        return value
    heads = value.view(3, model.heads, model.head_width, *value.shape[2:])
    return heads.transpose(0, 1).flatten(0, 2)


def from_plain(name: str, value: Tensor, model: Model) -> Tensor:
    """Return `value` of a parameter of the torch.nn GPT in the shape of the parameter `name` of this suite's GPT."""
    if ".qkv" not in name:
        return value
    heads = value.view(model.heads, 3, model.head_width, *value.shape[1:])
    return heads.transpose(0, 1).flatten(1, 2)


def initialise(module: PlainGPT, experiment: Experiment, device: torch.device) -> None:
    """Set the parameters, sharded or not, to this suite's initial values. Only one full parameter exists at a time."""
    first = _first_values(module, experiment)
    with torch.no_grad():
        for plain, parameter in module.named_parameters():
            name = suite_name(plain)
            full = to_plain(name, first[name](device), experiment.model)
            if isinstance(parameter, DTensor):
                shards = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(shards.to_local())
            else:
                parameter.copy_(full)


def _first_values(module: PlainGPT, experiment: Experiment) -> dict[str, Callable[[torch.device], Tensor]]:
    """Return a function for each parameter of the part that creates its full initial value, by name in this suite."""
    tp = meshes.single_rank_mesh().tp
    model = GPT(experiment.model, Layout(), experiment.training, tp, part=module.part)
    names = [getattr(p, "name_in_model", name) for name, p in model.named_parameters()]
    parameters = list(model.parameters())

    def make(i: int, device: torch.device) -> Tensor:
        values = initial_values(names, parameters, experiment, tp, device)
        return values(i, 0, parameters[i].numel()).view(parameters[i].shape)

    return {name: partial(make, i) for i, name in enumerate(names)}
