"""Which operators compute a layer, the loss and the optimizer: a layout's `kernels`."""

from __future__ import annotations

from repro.config.enums import StrEnum


class OperatorSet(StrEnum):
    """What a layer was computed with, from September 2019 to today.  The function is the same."""

    FUSED = "fused"
    """Each operator of `kernels/` is one pass over memory, on CUDA by a kernel of its own, and attention never
    writes its scores."""
    FUSED_2024 = "fused-2024"
    """The operators of `fused`, as compiled code and the libraries of 2024 run them: here they are the same, and
    predictions know them by a published point of their own."""
    REFERENCE = "reference"
    """The same operators, each by torch's own, on every device; on a CPU `fused` runs the same."""
    SOFTMAX = "softmax"
    """Megatron-LM of December 2020 and 2021 (2104.04473 sec. 4.2), which writes the scores, with scale, mask and
    softmax in one operator; what becomes of gradients is in passes."""
    UNFUSED = "unfused"
    """Megatron-LM of September 2019 (1909.08053) and DeepSpeed of February 2020 on it, with scale, mask, softmax,
    biases, dropouts and residuals as operators of their own; what becomes of gradients is in passes."""

    @property
    def plain(self) -> bool:
        """Whether torch's operators run in place of CUDA kernels."""
        return self is OperatorSet.REFERENCE

    @property
    def writes_scores(self) -> bool:
        """Whether attention writes its scores, [b, a/t, s, s]."""
        return self in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED)

    @property
    def in_passes(self) -> bool:
        """Whether weight gradients are added up beside the products that make them, copied to be reduced and back
        (`repro.parallel.zero.grad_reduce`), and widened, unscaled and clipped for the update
        (`repro.parallel.zero.optimizer`), each a pass over memory."""
        return self.writes_scores
