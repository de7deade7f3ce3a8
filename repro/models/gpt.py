"""The one model of the suite: GPT, decoder-only, pre-LayerNorm, learned positions, GELU, tied embedding.

Built on `meta`; whoever shards it makes the values.  Every matrix is written in the tensor-parallel form
of 1909.08053 sec. 3, which on one rank is the plain model.  Symbols: b samples, s tokens, h hidden, a
heads, t tensor-parallel ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from repro import kernels
from repro.config import Layout, Model, OperatorSet, Training
from repro.models import operator_sets
from repro.models.operator_sets import WeightDropout
from repro.parallel import tensor
from repro.parallel.comm import Group
from repro.parallel.recompute import recompute
from repro.parallel.zero.units import Unit, Use
from repro.parallel.zero_r.partitioned_activations import Checkpoints


@dataclass(frozen=True)
class Place:
    """Which samples of the training run a micro-batch holds; random numbers follow from it alone."""

    step: int
    first_sample: int
    """Number, within the step's global batch, of the micro-batch's first sample."""


@dataclass(frozen=True)
class Setting:
    """What all parts of one model share."""

    model: Model
    tp: Group
    sp: bool
    dropout: float
    attention_dropout: float
    seed: int
    operators: OperatorSet

    @property
    def plain(self) -> bool:
        """Whether torch's operators run in place of CUDA kernels."""
        return self.operators.plain

    def key(self, place: Place, layer: int, site: int) -> int:
        """Key of the random numbers of one dropout in one step."""
        return kernels.derive_key(self.seed, place.step, layer, site)  # layer 0 is the embedding


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    setting: Setting,
    place: Place,
    layer: int,
    site: int,
) -> Tensor:
    """residual + dropout(x + bias) on x [b, s, h]; under `sp` the rank's part of the sequence."""
    s = x.shape[1]
    first_position = setting.tp.rank * s if setting.sp else 0
    seq = s * setting.tp.size if setting.sp else s
    key = setting.key(place, layer, site) if setting.dropout else 0

    def fused(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return kernels.bias_dropout_residual(
            x,
            bias,
            residual,
            setting.dropout,
            key,
            place.first_sample,
            seq,
            first_position,
            True,
            plain=setting.plain,
        )

    if setting.operators is OperatorSet.UNFUSED:
        return operator_sets.unfused_dropout_add(x, bias, residual, fused)
    return fused(x, bias, residual)


class Embedding(nn.Module):
    """Tokens (split by vocabulary) plus positions, then dropout: [b, s] to [b, s, h]."""

    def __init__(self, setting: Setting):
        super().__init__()
        m = setting.model
        self.setting = setting
        self.tokens = token_parameter(setting)
        self.positions = tensor.split_parameter((m.seq, m.hidden), None, setting.tp, "normal")

    def forward(self, tokens: Tensor, place: Place) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        x = tensor.embed(tokens, self.tokens, tp)
        x = tensor.reduce_output(x, tp, sp, "embedding")
        s = x.shape[1]
        start = tp.rank * s if sp else 0
        x = x + self.positions[start : start + s]
        return dropout_add(x, None, None, self.setting, place, 0, 0)


class Attention(nn.Module):
    """x + dropout(attention(norm(x))), causal; each rank has a/t of the heads."""

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        m, tp = setting.model, setting.tp
        self.setting, self.layer = setting, layer
        self.heads = m.heads // tp.size
        inner = m.heads * m.head_width
        self.norm, self.norm_bias = norm_parameters(setting)
        # Query, key and value are three matrices, each split by heads.
        self.qkv = tensor.split_parameter((3, inner, m.hidden), 1, tp, "normal", used_once=True)
        self.qkv_bias = tensor.split_parameter((3, inner), 1, tp, "zeros")
        self.out = tensor.split_parameter((m.hidden, inner), 1, tp, "residual", used_once=True)
        self.out_bias = duplicate(m.hidden, "zeros", tp, setting.sp)

    def forward(self, x: Tensor, place: Place, mask: Tensor | None) -> Tensor:
        """`mask` is there where the operator set applies one as a tensor (`unfused`)."""
        tp, sp = self.setting.tp, self.setting.sp
        y = kernels.layer_norm(x, self.norm, self.norm_bias, plain=self.setting.plain)
        bias = self.qkv_bias.flatten()
        if mask is None:
            qkv = tensor.column_linear(y, self.qkv, bias, tp, sp, "block")
        else:
            qkv = operator_sets.add_bias(tensor.column_linear(y, self.qkv, None, tp, sp, "block"), bias)
        b, s, _ = qkv.shape  # [b, s, 3 a/t d]
        q, k, v = qkv.view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)  # each [b, a/t, s, d]
        y = operator_sets.attention(self.setting.operators, q, k, v, self._weight_dropout(place), mask)
        y = y.transpose(1, 2).reshape(b, s, -1)  # [b, s, a/t d]
        y = tensor.row_linear(y, self.out, tp, sp, "block")
        return dropout_add(y, self.out_bias, x, self.setting, place, self.layer, 1)

    def _weight_dropout(self, place: Place) -> WeightDropout | None:
        p = self.setting.attention_dropout
        if not p:
            return None
        key = self.setting.key(place, self.layer, 0)
        first_head = self.setting.tp.rank * self.heads
        return WeightDropout(p, key, place.first_sample, self.setting.model.heads, first_head)


class Mlp(nn.Module):
    """x + dropout(mlp(norm(x))); each rank has f/t of the hidden units."""

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        m, tp = setting.model, setting.tp
        self.setting, self.layer = setting, layer
        self.norm, self.norm_bias = norm_parameters(setting)
        self.up = tensor.split_parameter((m.ffn_width, m.hidden), 0, tp, "normal", used_once=True)
        self.up_bias = tensor.split_parameter((m.ffn_width,), 0, tp, "zeros")
        self.down = tensor.split_parameter((m.hidden, m.ffn_width), 1, tp, "residual", used_once=True)
        self.down_bias = duplicate(m.hidden, "zeros", tp, setting.sp)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        y = kernels.layer_norm(x, self.norm, self.norm_bias, plain=self.setting.plain)
        y = tensor.column_linear(y, self.up, None, tp, sp, "block")
        if self.setting.operators is OperatorSet.UNFUSED:
            y = operator_sets.unfused_gelu(y, self.up_bias)
        else:
            y = kernels.bias_gelu(y, self.up_bias, plain=self.setting.plain)
        y = tensor.row_linear(y, self.down, tp, sp, "block")
        return dropout_add(y, self.down_bias, x, self.setting, place, self.layer, 2)


class Block(nn.Module):
    """One transformer layer: two all-reduces forward and two backward under tp."""

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        self.attention = Attention(setting, layer)
        self.mlp = Mlp(setting, layer)

    def forward(self, x: Tensor, place: Place, mask: Tensor | None = None) -> Tensor:
        return self.mlp(self.attention(x, place, mask), place)


class LossHead(nn.Module):
    """Final norm, logits with the tied embedding, loss per token: [b, s, h] and [b, s] to fp32 [b * s]."""

    def __init__(self, setting: Setting, tokens: nn.Parameter | None):
        """Without `tokens`, the embedding of the same rank, the head has a copy of its own (`tied`)."""
        super().__init__()
        self.setting = setting
        self.norm, self.norm_bias = norm_parameters(setting)
        self.tokens = tokens if tokens is not None else token_parameter(setting)
        self.of_logits: Callable[[Tensor, Tensor], Tensor] = partial(
            tensor.vocab_parallel_cross_entropy, tp=setting.tp, plain=setting.plain
        )
        """What becomes of logits [b * s, V/t] and targets [b * s]; who evaluates puts its own here."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        x = kernels.layer_norm(x, self.norm, self.norm_bias, plain=self.setting.plain)
        logits = tensor.column_linear(x, self.tokens, None, tp, sp, "head")
        return self.of_logits(logits.flatten(0, 1), targets.flatten())


def duplicate(size: int, init: str, tp: Group, sp: bool) -> nn.Parameter:
    """A vector [size] that every tp rank holds; under `sp` each sees its part of the sequence only."""
    parameter = tensor.split_parameter((size,), None, tp, init)
    parameter.partial = sp  # type: ignore[attr-defined]
    return parameter


def norm_parameters(setting: Setting) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a layer norm."""
    h, tp, sp = setting.model.hidden, setting.tp, setting.sp
    return duplicate(h, "ones", tp, sp), duplicate(h, "zeros", tp, sp)


def token_parameter(setting: Setting) -> nn.Parameter:
    """The token embedding [V/t, h]."""
    m = setting.model
    tokens = tensor.split_parameter((m.vocab, m.hidden), 0, setting.tp, "normal")
    tokens.name_in_model = "embed.tokens"  # type: ignore[attr-defined]
    return tokens


@dataclass(frozen=True)
class Part:
    """Which part of the model a module is: all of it, or a pipeline stage's chunk."""

    layers: range
    first: bool = True
    """With the embedding."""
    last: bool = True
    """With the final norm, the logits and the loss."""


class GPT(nn.Module):
    """A part of the model, by default all of it.

    Its input is tokens [b, s] (int64) if it is the first part, else [b, s, h]; its output the mean loss
    (0-dim fp32) of targets [b, s] if it is the last, else [b, s, h] (s/t under sp).  `checkpoints` keeps
    the blocks' inputs; with None nothing is recomputed.  Submodules have the same names in every part.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        training: Training,
        tp: Group,
        checkpoints: Checkpoints | None = None,
        part: Part | None = None,
    ):
        super().__init__()
        dropouts = (training.dropout, training.attention_dropout)
        setting = Setting(model, tp, layout.sp, *dropouts, training.seed, layout.kernels)
        self.masked = layout.kernels is OperatorSet.UNFUSED
        self.checkpoints = checkpoints
        self.part = part or Part(range(model.layers))
        if self.part.first:
            self.embed = Embedding(setting)
            self.embed.positions.partial = layout.sp  # type: ignore[attr-defined]
        self.blocks = nn.ModuleDict({str(i): Block(setting, i + 1) for i in self.part.layers})
        if self.part.last:
            self.head = LossHead(setting, self.embed.tokens if self.part.first else None)
        if self.part.first != self.part.last:
            tokens = self.embed.tokens if self.part.first else self.head.tokens
            tokens.tied = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, targets: Tensor, place: Place) -> Tensor:
        x = self.hidden(x, targets.shape[1], place)
        return self.head(x, targets).mean() if self.part.last else x

    def hidden(self, x: Tensor, s: int, place: Place) -> Tensor:
        """What the last block of this part makes of `x`, in samples of `s` tokens: [b, s, h] (s/t under sp)."""
        if self.part.first:
            x = self.embed(x, place)
        # One for all layers, made anew for every micro-batch as the loader of 2019 did.
        mask = operator_sets.past(s, x) if self.masked else None
        for block in self.blocks.values():
            x = self.run_block(block, x, place, mask)
        return x

    def run_block(self, block: nn.Module, x: Tensor, place: Place, mask: Tensor | None) -> Tensor:
        """`block(x, place, mask)`, run again in backward where there are `checkpoints`."""
        if self.checkpoints is not None:
            return recompute(partial(block, place=place, mask=mask), x, self.checkpoints)
        y: Tensor = block(x, place, mask)
        return y

    def zero_units(self) -> list[Unit]:
        """One unit a block; embeddings and final norm together, used by both ends (the embedding is tied)."""
        outer = []
        if self.part.first:
            outer.append(Use("embed", backward=False))
        if self.part.last:
            outer.append(Use("head"))
        blocks = [Unit(f"blocks.{i}", (Use(f"blocks.{i}"),)) for i in self.part.layers]
        return [Unit("outer", tuple(outer)), *blocks] if outer else blocks
