"""One transformer layer of the GPT: attention, MLP, and the norms and dropout that embedding and head also use.

Symbols: b samples, s tokens, h hidden, a heads, d head width, f MLP width, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from repro import kernels
from repro.config import Model, OperatorSet
from repro.model import operator_sets
from repro.model.operator_sets import WeightDropout
from repro.parallel import context, tensor
from repro.parallel.comm import Group
from repro.parallel.context import Positions
from repro.parallel.zero_r.activation_checkpointing import recompute_attention

KEYS_AND_VALUES = (".kv", ".kv_bias")
"""Name endings of the key and value parameters, which every tp rank has in full if key heads are fewer than ranks."""


Masks = tuple[Tensor, ...]
"""Tensors that attention applies to its scores: the causal mask for unfused operators, ALiBi's biases (one per chunk
of a sample on this rank: two under context parallelism), or none."""


@dataclass(frozen=True)
class BatchPosition:
    """Training step and first sample of a micro-batch, from which dropout derives its random numbers."""

    step: int
    first_sample: int
    """Index of the micro-batch's first sample in the global batch of its step."""
    keys: Tensor | None = None
    """Random number keys of all dropouts, int64 [layers + 1, DROPOUT_SITES, 2], in device memory for CUDA graphs; with
    None, kernels get their keys as arguments."""


DROPOUT_SITES = 3
"""Dropouts of a layer: attention weights, attention output, MLP output. The embedding is layer 0, with one."""


@dataclass(frozen=True)
class Setting:
    """Settings that all modules of a `GPT` share: model, process groups, dropout, operators and recomputation."""

    model: Model
    tp: Group
    cp: Group
    sp: bool
    dropout: float
    attention_dropout: float
    seed: int
    operators: OperatorSet
    recomputed: bool
    """Whether the backward pass recomputes each transformer layer."""
    selective: bool
    """Whether the backward pass recomputes only the core of attention: scores, softmax, and product with the values."""

    @property
    def plain(self) -> bool:
        """Return whether torch's operators run in place of the CUDA kernels of `repro.kernels`."""
        return self.operators.plain

    def positions(self, count: int) -> Positions:
        """Return the positions in a sample of the `count` tokens whose activations this rank holds between layers."""
        return context.positions(self.cp, count, *((self.tp.rank, self.tp.size) if self.sp else ()))

    def key(self, place: BatchPosition, layer: int, site: int) -> int:
        """Return the random number key of dropout `site` in a layer (0: embedding) at a micro-batch's training step."""
        return kernels.derive_key(self.seed, place.step, layer, site)

    def dropout_keys(self, place: BatchPosition) -> Tensor:
        """Return a micro-batch's random number keys of dropout, int64 [layers + 1, DROPOUT_SITES, 2] on the CPU."""
        return torch.tensor(
            [
                [
                    kernels.device_key(self.key(place, layer, site), place.first_sample)
                    for site in range(DROPOUT_SITES)
                ]
                for layer in range(self.model.layers + 1)
            ]
        )


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    setting: Setting,
    place: BatchPosition,
    layer: int,
    site: int,
) -> Tensor:
    """Return residual + dropout(x + bias) for x [b, s, h]; under cp and sp, s counts only this rank's tokens."""
    at = setting.positions(x.shape[1])
    seq = x.shape[1] * setting.cp.size * (setting.tp.size if setting.sp else 1)
    key = setting.key(place, layer, site) if setting.dropout and place.keys is None else 0

    def fused(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return kernels.bias_dropout_residual(
            x,
            bias,
            residual,
            setting.dropout,
            key,
            place.first_sample,
            seq,
            at.first,
            True,
            at.split,
            at.jump,
            device_key=None if place.keys is None else place.keys[layer, site],
            plain=setting.plain,
        )

    if setting.operators is OperatorSet.UNFUSED:
        return operator_sets.unfused_dropout_add(x, bias, residual, fused)
    return fused(x, bias, residual)


def side_by_side(heads: Tensor) -> Tensor:
    """Concatenate the outputs of attention heads: return [b, a/t, s, d] as [b, s, a/t d]."""
    b, _, s, _ = heads.shape
    return heads.transpose(1, 2).reshape(b, s, -1)


def flat(bias: Tensor | None) -> Tensor | None:
    """Return the biases [..., n] of several matrices as one vector; None for a layer without biases."""
    return None if bias is None else bias.flatten()


def duplicate(size: int, init: str, tp: Group, sp: bool) -> nn.Parameter:
    """Return a parameter [size] that every tp rank holds in full; under `sp`, each rank has a partial gradient."""
    parameter = tensor.split_parameter((size,), None, tp, init)
    parameter.partial = sp  # type: ignore[attr-defined]
    return parameter


def norm_parameters(setting: Setting) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weight and bias of a normalisation layer; the bias of an RMS norm is None."""
    m, tp, sp = setting.model, setting.tp, setting.sp
    weight = duplicate(m.hidden, "ones", tp, sp)
    return weight, duplicate(m.hidden, "zeros", tp, sp) if m.norm == "layer" else None


def normalised(x: Tensor, weight: Tensor, bias: Tensor | None, setting: Setting) -> Tensor:
    """Return x [b, s, h] after LayerNorm or, without a bias, RMS norm."""
    eps, plain = setting.model.norm_eps, setting.plain
    if bias is None:
        return kernels.rms_norm(x, weight, eps, plain=plain)
    return kernels.layer_norm(x, weight, bias, eps, plain=plain)


class _Split(torch.autograd.Function):
    """Autograd function that splits x into views; backward writes their gradients once, to one tensor like x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.stack(gradients, ctx.dim), None


class Attention(nn.Module):
    """Attention sublayer with a causal mask, x + dropout(attention(norm(x))); each tp rank has a/t of the heads.

    With grouped-query attention (fewer key heads than query heads), keys and values are a separate parameter.  With
    fewer key heads than tp ranks, every rank holds all key heads, uses one of them, and computes a partial gradient.
    """

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        m, tp = setting.model, setting.tp
        self.setting, self.layer = setting, layer
        self.heads, self.key_heads = m.heads // tp.size, max(1, m.key_heads // tp.size)
        self.norm, self.norm_bias = norm_parameters(setting)
        inner = m.heads * m.head_width
        biased = m.biases != "none"

        def parameters(shape: tuple[int, ...], split: int | None) -> tuple[nn.Parameter, nn.Parameter | None]:
            matrix = (*shape, m.hidden)
            weight = tensor.split_parameter(matrix, split, tp, "normal", used_once=split is not None)
            bias = tensor.split_parameter(shape, split, tp, "zeros") if biased else None
            for part in (weight, bias) if split is None else ():
                if part is not None:
                    vars(part)["partial"] = True
            return weight, bias

        self.has_own_keys = m.key_heads == m.heads
        """Whether each query head has its own key head, so that one parameter contains all three projections."""
        self.replicated = tp.size > m.key_heads
        if self.has_own_keys:
            self.qkv, self.qkv_bias = parameters((3, inner), 1)
        else:
            self.q, self.q_bias = parameters((inner,), 0)
            shape = (m.key_heads, 2, m.head_width)
            self.kv, self.kv_bias = parameters(shape, None if self.replicated else 0)
        self.out = tensor.split_parameter((m.hidden, inner), 1, tp, "residual", used_once=True)
        self.out_bias = duplicate(m.hidden, "zeros", tp, setting.sp) if m.biases == "all" else None

    def columns(self) -> list[tensor.Column]:
        """Return this tp rank's weights and biases of the projections to queries, keys and values."""
        if self.has_own_keys:
            return [(self.qkv, flat(self.qkv_bias))]
        return [(self.q, self.q_bias), (self._used(self.kv), flat(self._used(self.kv_bias)))]

    def _used(self, kv: Tensor | None) -> Any:
        """Return the key head in `kv` that this tp rank's queries use, or all of `kv` if no key head is replicated."""
        if kv is None or not self.replicated:
            return kv
        tp = self.setting.tp
        return kv.narrow(0, tp.rank * kv.shape[0] // tp.size, 1)

    def attended(self, products: Sequence[Tensor], place: BatchPosition, masks: Masks) -> Tensor:
        """Return the attention of this tp rank's heads, [b, a/t, s, d]. `products`: projections to q, k and v."""
        q, k, v = self._heads(products)  # shapes [b, a/t, s, d]; k and v may have fewer heads than q
        operators, cp, dropout = self.setting.operators, self.setting.cp, self._weight_dropout(place)

        def of_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: int = 0) -> Tensor:
            mask = masks[chunk] if masks else None
            return operator_sets.attend(operators, q, k, v, dropout, mask, cp.size)

        if self.setting.selective:
            return recompute_attention(of_chunk, q, k, v)
        if cp.size == 1:
            return of_chunk(q, k, v)
        return context.attend_to_gathered(q, k, v, cp, of_chunk, again=not self.setting.recomputed)

    def _heads(self, products: Sequence[Tensor]) -> tuple[Tensor, ...]:
        a, width, (b, s, _) = self.heads, self.setting.model.head_width, products[0].shape
        if self.has_own_keys:
            qkv = self._turned(products[0], 2 * a)  # queries, keys and values: [b, s, 3 a/t d]
            parts: tuple[Tensor, ...] = _Split.apply(qkv.view(b, s, 3, a, width), 2)
            return tuple(x.transpose(1, 2) for x in parts)
        q = self._turned(products[0], a).view(b, s, a, width)
        k, v = _Split.apply(products[1].view(b, s, self.key_heads, 2, width), 3)
        if self.setting.model.positions == "rotary":
            k = self._turned(k.reshape(b, s, -1), self.key_heads).view(v.shape)
        if self.setting.operators is OperatorSet.MEGATRON_2025:
            v = v.contiguous()  # Transformer Engine copies values whose strides differ from the keys'.
        return tuple(x.transpose(1, 2) for x in (q, k, v))

    def _turned(self, x: Tensor, heads: int) -> Tensor:
        """Rotate the first `heads` of n heads in x [b, s, n d] by rotary position embedding, if the model uses it."""
        m = self.setting.model
        if m.positions != "rotary":
            return x
        at = context.positions(self.setting.cp, x.shape[1])
        how = (heads, m.head_width, m.rotary_width, m.rotary_base, *at)
        return kernels.rotary(x, *how, plain=self.setting.plain)

    def forward(self, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        """Return x + dropout(attention(norm(x))) for x [b, s, h]."""
        tp, sp = self.setting.tp, self.setting.sp
        y = normalised(x, self.norm, self.norm_bias, self.setting)
        columns = self.columns()
        if self.setting.operators is not OperatorSet.UNFUSED:
            products = tensor.column_linears(y, columns, tp, sp, "block", plain=self.setting.plain)
        else:
            ((weight, bias),) = columns
            products = tensor.column_linears(y, [(weight, None)], tp, sp, "block")
            products = (operator_sets.add_bias(products[0], bias),) if bias is not None else products
        y = self.attended(products, place, masks)
        y = side_by_side(y)
        y = tensor.row_linear(y, self.out, tp, sp, "block")
        return dropout_add(y, self.out_bias, x, self.setting, place, self.layer, 1)

    def _weight_dropout(self, place: BatchPosition) -> WeightDropout | None:
        p = self.setting.attention_dropout
        if not p:
            return None
        key = self.setting.key(place, self.layer, 0) if place.keys is None else 0
        first_head = self.setting.tp.rank * self.heads
        device_key = None if place.keys is None else place.keys[self.layer, 0]
        heads = self.setting.model.heads
        return WeightDropout(p, key, place.first_sample, heads, first_head, device_key)


class Mlp(nn.Module):
    """MLP sublayer, x + dropout(mlp(norm(x))); each tp rank has f/t of the MLP's f hidden units."""

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        m, tp = setting.model, setting.tp
        self.setting, self.layer = setting, layer
        if m.blocks != "parallel-one-norm":
            self.norm, self.norm_bias = norm_parameters(setting)
        # For SwiGLU, the parameter holds two matrices, the gate first; tp ranks split both by hidden units.
        shape, split = ((2, m.ffn_width), 1) if m.mlp == "swiglu" else ((m.ffn_width,), 0)
        biased = m.biases == "all"
        self.up = tensor.split_parameter((*shape, m.hidden), split, tp, "normal", used_once=True)
        self.up_bias = tensor.split_parameter(shape, split, tp, "zeros") if biased else None
        self.down = tensor.split_parameter((m.hidden, m.ffn_width), 1, tp, "residual", used_once=True)
        self.down_bias = duplicate(m.hidden, "zeros", tp, setting.sp) if biased else None

    def columns(self) -> list[tensor.Column]:
        """Return the first matrix of the MLP with its bias, or without the bias if the GELU operator adds the bias."""
        return [(self.up, None if self.setting.model.mlp == "gelu" else flat(self.up_bias))]

    def activated(self, y: Tensor) -> Tensor:
        """Return GELU or SwiGLU of `y`, the output of the MLP's first linear layer: [b, s, f/t] on this tp rank."""
        kind, plain = self.setting.model.mlp, self.setting.plain
        if kind == "swiglu":
            return kernels.swiglu(y, plain=plain)
        if kind == "gelu-erf" or self.up_bias is None:
            return F.gelu(y, approximate="none" if kind == "gelu-erf" else "tanh")
        if self.setting.operators is OperatorSet.UNFUSED:
            return operator_sets.unfused_gelu(y, self.up_bias)
        return kernels.bias_gelu(y, self.up_bias, plain=plain)

    def forward(self, x: Tensor, place: BatchPosition) -> Tensor:
        tp, sp = self.setting.tp, self.setting.sp
        y = normalised(x, self.norm, self.norm_bias, self.setting)
        (y,) = tensor.column_linears(y, self.columns(), tp, sp, "block", plain=self.setting.plain)
        y = self.activated(y)
        y = tensor.row_linear(y, self.down, tp, sp, "block")
        return dropout_add(y, self.down_bias, x, self.setting, place, self.layer, 2)


class Block(nn.Module):
    """One transformer layer, with attention and MLP in sequence or, for `blocks = parallel`, on the same input."""

    def __init__(self, setting: Setting, layer: int):
        super().__init__()
        self.setting, self.layer = setting, layer
        self.attention = Attention(setting, layer)
        self.mlp = Mlp(setting, layer)

    def forward(self, x: Tensor, place: BatchPosition, masks: Masks = ()) -> Tensor:
        if self.setting.model.blocks == "sequential":
            return self.mlp(self.attention(x, place, masks), place)
        return self._parallel(x, place, masks)

    def _parallel(self, x: Tensor, place: BatchPosition, masks: Masks) -> Tensor:
        """Return x + dropout(attention(norm(x)) + mlp(norm(x))), with one norm or two, and one all-reduce over tp."""
        setting, attention, mlp = self.setting, self.attention, self.mlp
        tp, sp = setting.tp, setting.sp
        y = normalised(x, attention.norm, attention.norm_bias, setting)
        if setting.model.blocks == "parallel-one-norm":
            columns = [*attention.columns(), *mlp.columns()]
            *products, up = tensor.column_linears(y, columns, tp, sp, "block", plain=setting.plain)
        else:
            products = list(
                tensor.column_linears(y, attention.columns(), tp, sp, "block", plain=setting.plain)
            )
            y = normalised(x, mlp.norm, mlp.norm_bias, setting)
            (up,) = tensor.column_linears(y, mlp.columns(), tp, sp, "block", plain=setting.plain)
        y = tensor.row_products(side_by_side(attention.attended(products, place, masks)), attention.out)
        y = tensor.reduce_output(y + tensor.row_products(mlp.activated(up), mlp.down), tp, sp, "block")
        biases = attention.out_bias, mlp.down_bias
        bias = None if biases[0] is None or biases[1] is None else biases[0] + biases[1]
        return dropout_add(y, bias, x, setting, place, self.layer, 1)
