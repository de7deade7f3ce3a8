"""Closed forms of the papers, and counts of lines of this repository's scripts, for expressions of the ledger.

Sizes are bytes unless the name has `elements`; times are seconds; work is FLOP.  Psi is the number of
parameters, Nd the data-parallel degree, Nm (`mp`) the model-parallel degree, K the optimizer bytes per
parameter.  ZERO3 is arXiv 1910.02054v3, MEG1 1909.08053v4, MEG2 2104.04473v5.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from math import inf, sqrt

GB, GiB, TB = 1e9, 2**30, 1e12
MINUTE, HOUR, DAY = 60, 3600, 86400
K_ADAM = 12
"""Bytes of Adam's optimizer state per parameter: fp32 master copy 4, momentum 4, variance 4 (ZERO3 sec. 3.1)."""


# --- memory -----------------------------------------------------------------------------------------


def model_state_bytes(psi: float, nd: float = 1, stage: int = 0, k: float = K_ADAM, mp: float = 1) -> float:
    """Return the bytes of parameters, gradients and optimizer states per device in mixed precision.

    The bytes are `(2 + 2 + K) Psi`, `4 Psi + K Psi/Nd`, `2 Psi + (2 + K) Psi/Nd`, `(4 + K) Psi/Nd` for ZeRO stages
    0 to 3 (ZERO3 sec. 5.1-5.3, Fig. 1), with Psi/mp parameters per model-parallel rank.
    """
    return _bytes_per_parameter(nd, stage, k) * psi / mp


def _bytes_per_parameter(nd: float, stage: int, k: float) -> float:
    if stage not in (0, 1, 2, 3):
        raise ArithmeticError(f"ZeRO stage {stage} does not exist; must be 0, 1, 2 or 3")
    weights, gradients = 2.0, 2.0
    optimizer = k / nd if stage >= 1 else k
    gradients = gradients / nd if stage >= 2 else gradients
    weights = weights / nd if stage >= 3 else weights
    return weights + gradients + optimizer


def memory_reduction(nd: float, stage: int, k: float = K_ADAM) -> float:
    """Return data parallelism's model-state bytes over those of a ZeRO stage (ZERO3 sec. 1). `nd` may be `inf`."""
    return (4 + k) / _bytes_per_parameter(nd, stage, k)


def max_params(memory: float, nd: float = 1, stage: int = 0, mp: float = 1, k: float = K_ADAM) -> float:
    """Return the largest number of parameters whose model states fit in `memory` bytes (ZERO3 Table 2, theoretical)."""
    return memory * mp / _bytes_per_parameter(nd, stage, k)


def layer_activation_bytes(
    b: float, s: float, h: float, a: float, t: float = 1, sp: int = 0, selective: int = 0
) -> float:
    """Return the bytes of 16-bit activations per layer on one of t tensor-parallel ranks (2205.05198 eq. 1 to 6).

    The bytes are `s b h (10 + 24/t + 5 a s/(h t))` for b samples of s tokens, a heads and width h. Sequence
    parallelism (`sp`) divides the 10 by t. Selective recomputation (`selective`) removes the last term, the scores.
    """
    return s * b * h * ((10 / t if sp else 10) + (24 + (0 if selective else 5 * a * s / h)) / t)


def adam_state_bytes(psi: float, nd: float = 1) -> float:
    """Return `K Psi/Nd`: bytes of Adam's fp32 weights, momentum and variance per device (ZERO3 sec. 3.1, 5.1)."""
    return K_ADAM * psi / nd


def deepspeed_zero2_estimate(psi: float, nd: float) -> float:
    """Return `2 Psi + 18 Psi/Nd`: DeepSpeed's estimate of model-state bytes per device with ZeRO 2, without offload."""
    return 2 * psi + 18 * psi / nd


def activation_elements(hidden: float, batch: float, seq: float, layers: float) -> float:
    """Return `12 h b s l`: activation elements of a GPT-2-like model with l layers (ZERO3 sec. 3.2, footnote)."""
    return 12 * hidden * batch * seq * layers


def checkpoint_elements(hidden: float, batch: float, seq: float, layers: float, mp: float = 1) -> float:
    """Return `h b s l / mp`: elements of one activation checkpoint per layer, partitioned by P_a (ZERO3 sec. 6.1)."""
    return hidden * batch * seq * layers / mp


def flat_buffer_bytes(psi: float) -> float:
    """Return `4 Psi`: bytes of one fp32 buffer with all gradients (ZERO3 sec. 3.2)."""
    return 4 * psi


def arithmetic_intensity(hidden: float) -> float:
    """Return `12 h`: forward FLOP of a block (24 b s h^2) per byte of its fp16 activation checkpoint (2 b s h)."""
    return 12 * hidden


# --- communication ----------------------------------------------------------------------------------


def dp_elements(psi: float, stage: int = 0, variant: str = "reduce-scatter") -> float:
    """Return the elements that data parallelism communicates per rank and step (ZERO3 sec. 7.1-7.2).

    The number is 2 Psi, and 3 Psi with ZeRO stage 3. `variant="all-reduce"` is stage 1 of DeepSpeed's release of
    February 2020: all-reduce 2 Psi + all-gather Psi.
    """
    if variant not in ("reduce-scatter", "all-reduce"):
        raise ArithmeticError(f"the variant {variant!r} is unknown; must be reduce-scatter or all-reduce")
    if stage == 3 or (stage == 1 and variant == "all-reduce"):
        return 3 * psi
    return 2 * psi


def megatron_all_reduces(recompute: int = 0) -> int:
    """Return the tensor-parallel all-reduces per layer (MEG1 sec. 3): 2 per pass, and 2 for full recomputation."""
    return 4 + 2 * recompute


def megatron_block_elements(seq: float, hidden: float, recompute: int = 1) -> float:
    """Return the elements of tensor parallelism's all-reduces per sample and block: 2 s h each (ZERO3 sec. 8)."""
    return megatron_all_reduces(recompute) * 2 * seq * hidden


def partitioned_activation_elements(seq: float, hidden: float) -> float:
    """Return `s h`: elements of the all-gather that P_a adds per sample and block (ZERO3 sec. 8)."""
    return seq * hidden


def tensor_parallel_elements(batch: float, seq: float, hidden: float, t: float) -> float:
    """Return `8 b s h (t-1)/t`: elements per device of a layer's 4 tensor-parallel all-reduces (MEG2 sec. 3.2)."""
    return megatron_all_reduces() * batch * seq * hidden * ring_all_reduce_factor(t)


def pipeline_elements(batch: float, seq: float, hidden: float, scatter: float = 1) -> float:
    """Return `b s h / scatter`: elements between stages per micro-batch; `scatter` is t or 1 (MEG2 sec. 4.1)."""
    return batch * seq * hidden / scatter


def pipeline_messages(p: float, m: float, v: float = 1) -> float:
    """Return `2 m (p v - 1)`: number of tensors that pipeline stages send per step, both directions (MEG2 sec. 2.2)."""
    return 2 * m * (p * v - 1)


def ring_all_reduce_factor(n: float) -> float:
    """Return `2 (n-1)/n`: elements that each of n ranks sends in a ring all-reduce, per element of the message."""
    return 2 * (n - 1) / n


# --- parameters, FLOP and training time -------------------------------------------------------------


def gpt_params(layers: float, hidden: float, vocab: float = 51200, seq: float = 1024) -> float:
    """Return `12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))`: number of parameters of a GPT model (MEG2 eq. 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))


def gpt_flops(
    batch: float,
    seq: float,
    layers: float,
    hidden: float,
    vocab: float = 0,
    attention: int = 1,
    recompute: int = 1,
) -> float:
    """Return `96 B s l h^2 (1 + s/(6 h) + V/(16 l h))`: FLOP of a GPT model's training step (MEG2 eq. 3).

    The formula includes full recomputation. `vocab=0` omits the logits and `attention=0` the term s/6h, as some
    sources do. `recompute=0` gives 72 B s l h^2 (...) without recomputation (the logits are never recomputed).
    """
    layer_term = 24 * (3 + recompute) * (1 + attention * seq / (6 * hidden))
    return batch * seq * layers * hidden**2 * (layer_term + 6 * vocab / (layers * hidden))


def bubble_fraction(p: float, m: float, v: float = 1) -> float:
    """Return `(p-1) / (v m)`: idle over compute time of a pipeline with m micro-batches (MEG2 sec. 2.2)."""
    return (p - 1) / (v * m)


@cache
def schedule_bubble(p: float, m: float, v: float = 1) -> float:
    """Return the bubble fraction (idle over compute time) of this suite's schedule: interleaved if v > 1, else 1F1B."""
    from repro.config.errors import ConfigError
    from repro.parallel.pipeline import schedule

    counts = (int(p), int(m), int(v))
    if counts != (p, m, v):
        raise ArithmeticError(f"stages, micro-batches and chunks must be integers, not {p}, {m}, {v}")
    try:
        return float(
            schedule.bubble_ratio(schedule.build_schedule("interleaved" if v > 1 else "1f1b", *counts))
        )
    except ConfigError as error:
        raise ArithmeticError(str(error)) from None


def train_seconds(tokens: float, params: float, gpus: float, flops_per_gpu: float) -> float:
    """Return `8 T P / (n X)`: seconds to train P parameters on T tokens with n GPUs at X FLOP/s each (MEG2 eq. 4)."""
    return 8 * tokens * params / (gpus * flops_per_gpu)


def training_steps(tokens: float, global_batch: float, seq: float) -> float:
    """Return the number of optimizer steps that process the given number of tokens once."""
    return tokens / (global_batch * seq)


def rounded(value: float, step: float) -> float:
    """Return `value` rounded to a multiple of `step`, since some sources calculate with rounded numbers."""
    return round(value / step) * step


def mean(*values: float) -> float:
    """Return the arithmetic mean of the arguments."""
    return sum(values) / len(values)


def _root(x: float) -> float:
    """Return the square root of `x`. Raises `ArithmeticError` if `x` is negative."""
    if x < 0:
        raise ArithmeticError("no real root")
    return sqrt(x)


FORMULAS: dict[str, Callable[..., float]] = {
    name: value
    for name, value in globals().items()
    if callable(value) and value.__module__ == __name__ and not name.startswith("_")
}
"""Formulas that ledger expressions may call, by name: the public functions of this module, and `sqrt`."""
FORMULAS["sqrt"] = _root
CONSTANTS: dict[str, float] = {
    "GB": GB,
    "GiB": GiB,
    "TB": TB,
    "MINUTE": MINUTE,
    "HOUR": HOUR,
    "DAY": DAY,
    "inf": inf,
}


@cache
def changed_lines(script: str) -> int:
    """Return how many lines of `examples/plain/SCRIPT.py` are changed, added or removed in `examples/zero/SCRIPT.py`.

    A replaced line counts once. Blank lines and comments do not count.

    Raises:
        ArithmeticError: One of the two example scripts does not exist.
    """
    before, after = (_code_lines(kind, script) for kind in ("plain", "zero"))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(
        max(old_end - old, new_end - new)
        for what, old, old_end, new, new_end in matcher.get_opcodes()
        if what != "equal"
    )


def _code_lines(kind: str, script: str) -> list[str]:
    try:
        text = files(f"repro.examples.{kind}").joinpath(f"{script}.py").read_text(encoding="utf-8")
    except (OSError, ModuleNotFoundError):
        raise ArithmeticError(f"examples/{kind}/{script}.py does not exist") from None
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


SCRIPT_COUNTS: dict[str, Callable[..., int]] = {"changed_lines": changed_lines}
"""Functions by which expressions of the ledger count lines of the scripts in `examples/`."""
