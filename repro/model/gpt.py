"""The model that experiments train: a decoder-only transformer, GPT-2 or a variant (Llama, GPT-NeoX, BLOOM).

Modules are built on `meta`, and the code that shards them creates the values.  Tensor parallelism splits matrices as
in 1909.08053 sec. 3.  Symbols: b samples, s tokens, h hidden, a heads, t tensor-parallel ranks, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from repro import kernels
from repro.config import Experiment, Layout, Model, OperatorSet, Training
from repro.config.enums import Category
from repro.config.layout import SELECTIVE
from repro.model import operator_sets
from repro.model.layer import BatchPosition, Block, Masks, Setting, dropout_add, norm_parameters, normalised
from repro.parallel import context, storage, tensor
from repro.parallel import mesh as meshes
from repro.parallel.comm import Group
from repro.parallel.zero.flat_parameters import InitialValues
from repro.parallel.zero.partition import GatherUnit, ModuleUse
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints, recompute

__all__ = ["GPT", "BatchPosition", "Part", "initial_values"]

STANDARD_DEVIATION = 0.02
"""Standard deviation of initial weights (1909.08053 sec. 4.1)."""


class Embedding(nn.Module):
    """Token embedding (split by vocabulary), optional positions and norm, then dropout: tokens [b, s] to [b, s, h]."""

    def __init__(self, setting: Setting):
        super().__init__()
        m = setting.model
        self.setting = setting
        self.tokens = token_parameter(setting)
        self.positions = None
        if m.positions == "learned":
            self.positions = tensor.split_parameter((m.seq, m.hidden), None, setting.tp, "normal")
            self.positions.partial = setting.sp  # type: ignore[attr-defined]
        if m.embedding_norm:
            self.norm, self.norm_bias = norm_parameters(setting)

    def forward(self, tokens: Tensor, place: BatchPosition) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        x = tensor.embed(tokens, self.tokens, tp)
        x = tensor.reduce_output(x, tp, sp, "embedding")
        if self.positions is not None:
            x = x + self.setting.positions(x.shape[1]).rows(self.positions, x.shape[1])
        if self.setting.model.embedding_norm:
            x = normalised(x, self.norm, self.norm_bias, self.setting)
        return dropout_add(x, None, None, self.setting, place, 0, 0)


class LossHead(nn.Module):
    """Final norm, logits and loss: activations x [b, s, h] and targets [b, s] to fp32 losses per token [b * s]."""

    def __init__(self, setting: Setting, tokens: nn.Parameter | None):
        """Create the loss head. `tokens`: token embedding on this stage; with None, a tied head creates a copy."""
        super().__init__()
        m = setting.model
        self.setting = setting
        self.norm, self.norm_bias = norm_parameters(setting)
        if m.tied:
            self.tokens = tokens if tokens is not None else token_parameter(setting)
        else:
            shape = (m.vocab, m.hidden)
            self.output = tensor.split_parameter(shape, 0, setting.tp, "normal", used_once=True)
        self.of_logits: Callable[[Tensor, Tensor], Tensor] = partial(
            tensor.vocab_parallel_cross_entropy,
            tp=setting.tp,
            plain=setting.plain,
            copies_to_fp32=setting.operators is OperatorSet.TORCHTITAN_2024,
        )
        """Function that computes the loss from logits [b * s, V/t] and targets [b * s]; an evaluation replaces it."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        x = normalised(x, self.norm, self.norm_bias, self.setting)
        weight = self.tokens if self.setting.model.tied else self.output
        logits = tensor.column_linear(x, weight, None, tp, sp, "head")
        return self.of_logits(logits.flatten(0, 1), targets.flatten())


def token_parameter(setting: Setting) -> nn.Parameter:
    """Return this tp rank's part [V/t, h] of the token embedding as a parameter on the device `meta`."""
    m = setting.model
    tokens = tensor.split_parameter((m.vocab, m.hidden), 0, setting.tp, "normal")
    tokens.name_in_model = "embed.tokens"  # type: ignore[attr-defined]
    return tokens


@dataclass(frozen=True)
class Part:
    """Range of transformer layers in one part of the model, such as a pipeline chunk; by default the full model."""

    layers: range
    first: bool = True
    """Whether this part of the model contains the embedding."""
    last: bool = True
    """Whether this part of the model contains the final norm, the logits and the loss."""


class GPT(nn.Module):
    """Module with one part of the GPT, such as a pipeline chunk; by default the full model.

    The first part takes tokens [b, s] (int64), other parts activations [b, s, h].  The last part returns the mean loss
    (0-dim fp32) of targets [b, s], other parts return activations [b, s, h] (s/t under sp).  `checkpoints` saves the
    inputs of blocks for recomputation; None: no recomputation.  Submodules have the same names in every part.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        training: Training,
        tp: Group,
        checkpoints: ActivationCheckpoints | None = None,
        part: Part | None = None,
        cp: Group | None = None,
    ):
        """Create the GPT on `meta`. `cp`: context-parallel group; with None, each rank processes full samples."""
        super().__init__()
        cp = cp or meshes.single_rank_mesh().cp
        dropouts = (training.dropout, training.attention_dropout)
        again = checkpoints is not None, layout.recompute == SELECTIVE
        setting = Setting(model, tp, cp, layout.sp, *dropouts, training.seed, layout.kernels, *again)
        self.setting = setting
        self._alibi: Masks = ()
        """ALiBi's biases for the attention heads of this rank; empty until the first forward pass creates them."""
        self.checkpoints = checkpoints
        self.part = part or Part(range(model.layers))
        if self.part.first:
            self.embed = Embedding(setting)
        self.blocks = nn.ModuleDict({str(i): Block(setting, i + 1) for i in self.part.layers})
        if self.part.last:
            self.head = LossHead(setting, self.embed.tokens if self.part.first else None)
        if model.tied and self.part.first != self.part.last:
            tokens = self.embed.tokens if self.part.first else self.head.tokens
            tokens.tied = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, targets: Tensor, place: BatchPosition) -> Tensor:
        x = self.hidden(x, targets.shape[1], place)
        return self.head(x, targets).mean() if self.part.last else x

    def hidden(self, x: Tensor, s: int, place: BatchPosition) -> Tensor:
        """Return the output of the last transformer layer in this part of the model, [b, s, h] (s/t under sp).

        `s`: number of tokens of each sample on this rank.
        """
        if self.part.first:
            x = self.embed(x, place)
        masks = self._masks(s, x)
        for block in self.blocks.values():
            x = self.run_block(block, x, place, masks)
        return x

    def _masks(self, s: int, like: Tensor) -> Masks:
        """Return the masks or biases that all layers apply to their attention scores."""
        setting, cp = self.setting, self.setting.cp
        if setting.operators is OperatorSet.UNFUSED:
            # The causal mask is not cached, because Megatron-LM's data loader of 2019 created it for every micro-batch.
            return (operator_sets.causal_mask(s, like),)
        if setting.model.positions != "alibi":
            return ()
        stretches = context.chunks(cp.rank, cp.size, s * cp.size) if cp.size > 1 else (range(s),)
        cached = [(mask.shape[-1], mask.dtype, mask.device) for mask in self._alibi]
        if cached != [(queries.stop, like.dtype, like.device) for queries in stretches]:
            heads = setting.model.heads // setting.tp.size
            own = range(setting.tp.rank * heads, (setting.tp.rank + 1) * heads)
            made = (
                operator_sets.alibi_bias(setting.model.heads, own, queries, like) for queries in stretches
            )
            self._alibi = tuple(storage.mark(mask, Category.OTHER) for mask in made)
        return self._alibi

    def run_block(self, block: nn.Module, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        """Return the output of one transformer layer; with activation checkpoints, backward runs the layer again."""
        if self.checkpoints is not None:
            return recompute(partial(block, place=place, masks=masks), x, self.checkpoints)
        y: Tensor = block(x, place, masks)
        return y

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """Return sizes (rows, columns) of this rank's weight matrices; those that multiply one input count as one."""
        found: list[list[Tensor]] = []
        if self.part.last:
            found.append([self.head.tokens if self.setting.model.tied else self.head.output])
        for block in self.blocks.values():
            assert isinstance(block, Block)
            columns = [weight for weight, _ in block.attention.columns()]
            found += [columns, [block.attention.out], [block.mlp.up], [block.mlp.down]]
        return {(sum(w.numel() // w.shape[-1] for w in one), one[0].shape[-1]) for one in found}

    def zero_units(self) -> list[GatherUnit]:
        """Return ZeRO-3's gather units: one per block, and one (tied) or two (untied) for embedding and head."""
        # The embedding's backward pass reads parameters only if the embedding has a norm.
        ends = (
            [ModuleUse("embed", is_read_in_backward=self.setting.model.embedding_norm)]
            if self.part.first
            else []
        )
        ends += [ModuleUse("head")] if self.part.last else []
        blocks = [GatherUnit(f"blocks.{i}", (ModuleUse(f"blocks.{i}"),)) for i in self.part.layers]
        if self.setting.model.tied:
            return [GatherUnit("outer", tuple(ends)), *blocks] if ends else blocks
        first = [GatherUnit("embed", tuple(ends[:1]))] if self.part.first else []
        last = [GatherUnit("head", tuple(ends[-1:]))] if self.part.last else []
        return [*first, *blocks, *last]


def _full_index(
    start: int, stop: int, shape: Sequence[int], split: int | None, tp: Group, device: torch.device
) -> Tensor:
    """Return flat indices in a full parameter for elements start..stop of a tp rank's part, which has size `shape`."""
    local = torch.arange(start, stop, dtype=torch.int64, device=device)
    if split is None or tp.size == 1:
        return local
    inner = math.prod(shape[split + 1 :])
    part = shape[split] * inner
    outer = torch.div(local, part, rounding_mode="floor")
    return local + outer * (part * (tp.size - 1)) + tp.rank * part


def initial_values(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    experiment: Experiment,
    tp: Group,
    device: torch.device,
) -> InitialValues:
    """Return a function that computes fp32 initial values of the parameters of one tp rank.

    A value depends only on the seed, the parameter and the element, so that every layout has the same initial weights.
    The standard deviation is 0.02, divided by sqrt(2 layers) before residual additions (1909.08053 sec. 4.1).
    `parameters`: results of `tensor.split_parameter`.
    """
    shapes = [tuple(p.shape) for p in parameters]
    kinds = [p.init for p in parameters]  # type: ignore[attr-defined]
    splits: list[int | None] = [vars(p)["split"] for p in parameters]

    def values(i: int, start: int, stop: int) -> Tensor:
        if device.type == "meta":  # Simulations run on `meta`, where parameters have no values.
            return torch.empty(stop - start, device=device)
        if kinds[i] in ("zeros", "ones"):
            return torch.full((stop - start,), float(kinds[i] == "ones"), device=device)
        index = _full_index(start, stop, shapes[i], splits[i], tp, device)
        deviation = STANDARD_DEVIATION / (
            math.sqrt(2 * experiment.model.layers) if kinds[i] == "residual" else 1.0
        )
        key = kernels.derive_key(experiment.training.seed, zlib.crc32(names[i].encode()))
        return kernels.normal_at(index, key).mul_(deviation)

    return values
