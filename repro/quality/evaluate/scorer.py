"""The model on one rank, for forward passes only: no gradients, no optimizer; under stage 3 a rank keeps its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Layout, Model, Training
from repro.model.gpt import GPT, BatchPosition, Part
from repro.parallel import tensor
from repro.parallel.comm import MAX, Group
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.boundary import Boundary
from repro.parallel.pipeline.schedule import FORWARD
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Tag
from repro.parallel.zero.stages import ShardedModule, Sharding, leave_meta
from repro.quality.weights.source import WeightSource

NOWHERE = BatchPosition(0, 0)
"""No dropout, and so nothing depends on the place of a sample."""


@dataclass(frozen=True)
class Scores:
    """Of the tokens that count, in their order [n]."""

    loss: Tensor
    """fp32: minus the logarithm of their probability."""
    predicted: Tensor
    """int64: the most likely token in their place."""
    allowed: Tensor
    """int64: the most likely one that is no stop word."""


class Scorer:
    """A stage of the model with its weights."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        source: WeightSource,
        forbidden: Sequence[int] = (),
    ):
        """`model` is that of `source`, its vocabulary padded so that tp divides it; `forbidden` are stop words."""
        parts, stage = layout.parts(model.layers), mesh.pp.rank
        part = Part(parts[stage], first=stage == 0, last=stage == len(parts) - 1)
        self.mesh, self.layout, self.part = mesh, layout, part
        self._vocab, self._width = source.model.vocab, model.hidden
        self._forbidden = torch.tensor(list(forbidden), dtype=torch.int64, device=device)
        self._found: Scores | None = None
        self._boundary: Boundary | None = None
        self._like = torch.empty(0, dtype=DTYPES[layout.precision], device=device)
        self.module = GPT(model, layout, Training(), mesh.tp, part=part).requires_grad_(False)
        if part.last:
            self.module.head.of_logits = self._of_logits

        names = [getattr(p, "name_in_model", name) for name, p in self.module.named_parameters()]

        def values(parameters: list[Parameter]) -> InitialValues:
            return source.values(names, mesh.tp.rank, mesh.tp.size, model.vocab)

        self._sharded: ShardedModule | None = None
        if layout.zero == 3:
            sharding = Sharding.from_layout(layout, mesh.dp, device, self._like.dtype)
            units = self.module.zero_units()
            self._sharded = ShardedModule(self.module, units, sharding, lambda p: Tag(0), values)
        else:
            _fill(self.module, values([]), self._like)

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, counts: Tensor) -> Scores | None:
        """Scores of those `targets` [b, s] that `counts` [b, s] (bool) says, after `tokens` [b, s].

        None but on the last stage.  Every call has the same shape, and counts something.
        """
        if self._sharded is not None:
            self._sharded.begin_forward()
        stage, x = self.mesh.pp.rank, tokens
        if not self.part.first:
            boundary = self._wire(tokens)
            boundary.expect(stage - 1, FORWARD)
            x = boundary.receive()
        x = self.module.hidden(x, tokens.shape[1], NOWHERE)
        if not self.part.last:
            self._wire(tokens).send(x, stage + 1, FORWARD)
            return None
        # The logits are the largest activation there is: those that do not count are not made.
        self.module.head(x[counts].unsqueeze(0), targets[counts].unsqueeze(0))
        found, self._found = self._found, None
        return found

    def finish(self) -> None:
        """Wait until the last messages are sent, and let go of what stage 3 has gathered."""
        if self._boundary is not None:
            self._boundary.finish()
        if self._sharded is not None:
            self._sharded.all_gather_params()

    def _wire(self, tokens: Tensor) -> Boundary:
        if self._boundary is None:
            shape = (*tokens.shape, self._width)
            self._boundary = Boundary(self.mesh.pp, self.mesh.tp, shape, self._like, split=False)
        return self._boundary

    def _of_logits(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Scores of logits [n, V/t]; a padded vocabulary's have no probability."""
        tp = self.mesh.tp
        first = tp.rank * rows.shape[1]
        rows[:, max(0, self._vocab - first) :] = float("-inf")
        predicted = allowed = _likeliest(rows, first, tp)
        if self._forbidden.numel():
            here = self._forbidden - first
            here = here[(here >= 0) & (here < rows.shape[1])]
            allowed = _likeliest(rows.index_fill(1, here, float("-inf")), first, tp)
        loss = tensor.vocab_parallel_cross_entropy(rows, targets, tp, plain=self.layout.kernels.plain)
        self._found = Scores(loss, predicted, allowed)
        return loss


def _likeliest(rows: Tensor, first: int, tp: Group) -> Tensor:
    """The token with the largest logit [n], of logits [n, V/t] that begin with token `first`; of several the first."""
    largest, index = rows.float().max(1)
    best = largest.clone()
    tp.all_reduce(best, MAX, "evaluation").wait()
    # The largest of negated ids is the first token.
    candidate = torch.where(largest == best, -(index + first), torch.iinfo(torch.int64).min)
    tp.all_reduce(candidate, MAX, "evaluation").wait()
    return -candidate


def _fill(module: GPT, values: InitialValues, like: Tensor) -> None:
    """Give the module's parameters memory and what the files have for them."""
    leave_meta(module, like.device, like.dtype)
    for i, parameter in enumerate(module.parameters()):
        data = torch.empty(parameter.shape, dtype=like.dtype, device=like.device)
        data.view(-1).copy_(values(i, 0, data.numel()))
        parameter.data = data
