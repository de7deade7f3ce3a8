"""Settings of a training that are independent of model and layout: optimizer, schedule, data and seed."""

from __future__ import annotations

from dataclasses import dataclass

from repro.config.errors import require
from repro.config.sizes import POSITIVE_COUNT, STEPS, at_least, at_most

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training with AdamW on a stream of tokens: steps, learning rate, data and checkpoints."""

    steps: int = 20
    """Number of optimizer steps, including untimed steps and learning-rate warm-up."""
    untimed_steps: int = 3
    """Number of initial steps without time measurement; losses are recorded. The first step also measures memory."""
    seq: int = 0
    """Number of tokens per training sample; 0 means the model's longest sequence."""
    seed: int = 1234
    """Seed of initial weights, dropout and data order, which are equal under every layout."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine schedule."""
    warmup_steps: int = 0
    """Number of steps of linear learning-rate warm-up."""
    decay_steps: int = 0
    """Step at which the cosine schedule ends; 0 means `steps`."""
    schedule: str = "constant"
    """Learning-rate schedule after the warm-up: `constant` or `cosine`."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.95
    """Adam's second-moment decay."""
    eps: float = 1e-8
    """Constant that Adam adds to the denominator."""
    clip: float = 1.0
    """Maximum global gradient norm, to which larger gradients are scaled; 0 means no clipping."""
    dropout: float = 0.0
    """Dropout probability of the embedding and of both residual branches."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights. Above 0, attention writes its weights to memory, as in
    software of 2019 and 2020: in the data type of the step, or in fp32 if cp > 1."""
    deterministic: bool = False
    """Whether GPUs run deterministic operators, so that equal runs on the same GPUs and software give equal bits.
    Deterministic attention is slower in the backward pass and needs more memory. Runs on CPUs are always deterministic.
    A run with an operator that has no deterministic form fails with the name of the operator."""
    loss_scale: float = 65536.0
    """Initial value of the dynamic loss scale (fp16 only)."""
    loss_scale_window: int = 1000
    """Number of steps without overflow after which the loss scale doubles (fp16 only)."""
    loss_scale_hysteresis: int = 2
    """Number of overflows before the loss scale halves (fp16 only)."""
    checkpoint_every: int = 0
    """Steps between two checkpoints of the full training state, from which a stopped run resumes; 0 writes none."""
    continues: str = ""
    """Name of an experiment of the same suite from whose newest checkpoint this training starts; empty: new weights."""
    data: str = "synthetic"
    """Training data: `synthetic`, `shakespeare` (bytes), `shakespeare-gpt2` (BPE), or path of a .txt or .bin file."""

    def __post_init__(self) -> None:
        at_least(
            self, ("steps", "untimed_steps", "loss_scale_window", "loss_scale_hysteresis"), 1, POSITIVE_COUNT
        )
        counts = ("seq", "warmup_steps", "decay_steps", "checkpoint_every")
        at_least(self, (*counts, "weight_decay", "clip", "min_lr"), 0, "0 or more")
        for key in ("lr", "eps", "loss_scale"):
            require(getattr(self, key) > 0, key, getattr(self, key), "more than 0")
        for key in ("beta1", "beta2", "dropout", "attention_dropout"):
            require(0 <= getattr(self, key) < 1, key, getattr(self, key), "at least 0 and under 1")
        require(self.min_lr <= self.lr, "min_lr", self.min_lr, f"at most lr = {self.lr:g}")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more and below 2**63")
        at_most("steps", self.steps, STEPS)
        right = f"fewer than steps = {self.steps}, so that at least one step is timed"
        require(self.untimed_steps < self.steps, "untimed_steps", self.untimed_steps, right)
        says = "needs checkpoint_every of 1 or more"
        require(not self.continues or self.checkpoint_every > 0, "continues", self.continues, says=says)
        require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
