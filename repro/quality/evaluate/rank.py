"""Evaluation of a model on one rank: forward passes of its replica's text samples through its pipeline stage.

An evaluation has no gradients and no optimizer. Under ZeRO stage 3, a rank retains only its shards between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Experiment, Layout, Model, Training
from repro.config.enums import Phase
from repro.launch.job import Job
from repro.launch.rank.device_settings import rank_device
from repro.launch.rank.session import joined_process_group, make_mesh
from repro.launch.rank_process import HeartbeatWriter
from repro.model.gpt import GPT, BatchPosition, Part
from repro.parallel import tensor
from repro.parallel.comm import MAX, Group
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.boundary import Boundary
from repro.parallel.pipeline.schedule import FORWARD
from repro.parallel.storage import DTYPES
from repro.parallel.zero.flat_parameters import InitialValues, Sharding, Tag
from repro.parallel.zero.stages import ShardedModule, leave_meta
from repro.quality.evaluate.samples import Samples
from repro.quality.weights import open_weights
from repro.quality.weights.source import WeightSource

SampleScore = tuple[int, float, bool, bool]
"""Score of a text sample: its number, the sum of its losses, and two flags that are true if all predictions are right.

The first flag is for predictions from the full vocabulary, the second for predictions that exclude stop words.
"""


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Score an evaluation job's text samples on this rank; return `{"samples": scores}` by experiment key."""
    torch_device, experiment = rank_device(device), job.experiments[0]
    heartbeat.phase(0, 0, Phase.INIT)
    with joined_process_group(rank, world, torch_device, rendezvous):
        mesh = make_mesh(experiment, torch_device)
        beat: Callable[..., None] = lambda sequence, op, group, purpose: heartbeat.collective(
            sequence, op, group
        )
        mesh.ledger.observers.append(beat)
        source = open_weights(Path(job.task["weights"]), experiment.model)
        samples = Samples.load(Path(job.task["samples"]))
        forbidden = job.task["forbidden"]
        progress: Callable[[int], None] = lambda step: heartbeat.phase(0, step, Phase.FORWARD)
        rows = score_samples(experiment, mesh, torch_device, source, samples, forbidden, progress)
    heartbeat.phase(0, 0, Phase.DONE)
    return {experiment.key: {"samples": rows}}


def score_samples(
    experiment: Experiment,
    mesh: Mesh,
    device: torch.device,
    source: WeightSource,
    samples: Samples,
    forbidden: list[int],
    progress: Callable[[int], None] = lambda step: None,
) -> list[SampleScore]:
    """Return the scores of this replica's samples, on the first tp rank of the last stage; other ranks: []."""
    layout = experiment.layout
    scorer = Scorer(experiment.model, layout, mesh, device, source, forbidden)
    mine = range(mesh.dp.rank, len(samples.spans), layout.dp)
    # Every replica runs the same number of passes, because the all-gathers of ZeRO stage 3 need all replicas.
    share = -(-len(samples.spans) // layout.dp)
    rows: list[SampleScore] = []
    for step, start in enumerate(range(0, share, layout.micro_batch)):
        progress(step)
        numbers = list(mine[start : start + layout.micro_batch])
        tokens, targets, counts = padded_batch(samples, numbers, layout.micro_batch)
        found = scorer.score(tokens.to(device), targets.to(device), counts.to(device))
        if found is not None and mesh.tp.rank == 0:
            rows += _sample_scores(numbers, samples, found, targets[counts])
    scorer.finish()
    return rows


def padded_batch(samples: Samples, numbers: list[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch of samples: padded tokens, targets and the mask of scored targets, each [size, longest].

    Without samples, the mask has one unused target, so that the rank can run a forward pass with the other ranks.
    """
    tokens = torch.zeros(size, samples.longest + 1, dtype=torch.int64)
    counts = torch.zeros(size, samples.longest, dtype=torch.bool)
    counts[0, 0] = not numbers
    for row, number in enumerate(numbers):
        begin, length, scored = map(int, samples.spans[number])
        tokens[row, :length] = torch.from_numpy(samples.tokens[begin : begin + length])
        counts[row, length - 1 - scored : length - 1] = True
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), counts


def _sample_scores(
    numbers: list[int], samples: Samples, found: TokenScores, targets: Tensor
) -> list[SampleScore]:
    if not numbers:
        return []
    lengths = [int(samples.spans[number][2]) for number in numbers]
    right, allowed = found.predicted.cpu() == targets, found.allowed.cpu() == targets
    parts = zip(*(t.split(lengths) for t in (found.loss.cpu().double(), right, allowed)), strict=True)
    return [
        (number, float(loss.sum()), bool(one.all()), bool(other.all()))
        for number, (loss, one, other) in zip(numbers, parts, strict=True)
    ]


@dataclass(frozen=True)
class TokenScores:
    """Losses and predictions for the n target tokens that a mask selects, in the order of the tokens."""

    loss: Tensor
    """Negative log-likelihood of each target token, fp32 [n]."""
    predicted: Tensor
    """Most likely token at the position of each target token, int64 [n]."""
    allowed: Tensor
    """Most likely token that is not a stop word, at the position of each target token, int64 [n]."""


class Scorer:
    """Pipeline stage of a model with loaded weights, which computes losses and predictions for target tokens."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        source: WeightSource,
        forbidden: Sequence[int] = (),
    ):
        """Load this rank's weights of `model` (tp-padded vocabulary) from `source`. `forbidden`: stop words' ids."""
        parts, stage = layout.parts(model.layers), mesh.pp.rank
        part = Part(parts[stage], first=stage == 0, last=stage == len(parts) - 1)
        self.mesh, self.layout, self.part = mesh, layout, part
        self._vocab, self._width = source.model.vocab, model.hidden
        self._forbidden = torch.tensor(list(forbidden), dtype=torch.int64, device=device)
        self._found: TokenScores | None = None
        self._boundary: Boundary | None = None
        self._like = torch.empty(0, dtype=DTYPES[layout.precision], device=device)
        self.module = GPT(model, layout, Training(), mesh.tp, part=part).requires_grad_(False)
        if part.last:
            self.module.head.of_logits = self._score_logits

        names = [getattr(p, "name_in_model", name) for name, p in self.module.named_parameters()]

        def values(parameters: list[Parameter]) -> InitialValues:
            return source.values(names, mesh.tp.rank, mesh.tp.size, model.vocab)

        self._sharded: ShardedModule | None = None
        if layout.zero == 3:
            sharding = Sharding.from_layout(layout, mesh.dp, device, self._like.dtype)
            units = self.module.zero_units()
            self._sharded = ShardedModule(self.module, units, sharding, lambda p: Tag(0), values)
        else:
            _load_parameters(self.module, values([]), self._like)

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, counts: Tensor) -> TokenScores | None:
        """Run a forward pass on `tokens` [b, s], and return the scores of those `targets` [b, s] that a mask selects.

        Pipeline stages other than the last return None. All calls must have the same shape and a non-empty mask.
        """
        if self._sharded is not None:
            self._sharded.begin_forward()
        stage, x = self.mesh.pp.rank, tokens
        if not self.part.first:
            boundary = self._stage_boundary(tokens)
            boundary.expect(stage - 1, FORWARD)
            x = boundary.receive()
        x = self.module.hidden(x, tokens.shape[1], BatchPosition(0, 0))
        if not self.part.last:
            self._stage_boundary(tokens).send(x, stage + 1, FORWARD)
            return None
        # Logits are the largest activation, so the head computes them for scored targets only.
        self.module.head(x[counts].unsqueeze(0), targets[counts].unsqueeze(0))
        found, self._found = self._found, None
        return found

    def finish(self) -> None:
        """Wait for the last sends between pipeline stages, and free the parameters that ZeRO stage 3 has gathered."""
        if self._boundary is not None:
            self._boundary.finish()
        if self._sharded is not None:
            self._sharded.all_gather_params()

    def _stage_boundary(self, tokens: Tensor) -> Boundary:
        if self._boundary is None:
            shape = (*tokens.shape, self._width)
            self._boundary = Boundary(self.mesh.pp, self.mesh.tp, shape, self._like, split=False)
        return self._boundary

    def _score_logits(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Store the scores of n target tokens from logits [n, V/t] (vocabulary V, tp degree t); return losses [n]."""
        tp = self.mesh.tp
        first = tp.rank * rows.shape[1]
        rows[:, max(0, self._vocab - first) :] = float("-inf")  # Padding ids are never predicted.
        predicted = allowed = _argmax_token(rows, first, tp)
        if self._forbidden.numel():
            local = self._forbidden - first
            local = local[(local >= 0) & (local < rows.shape[1])]
            allowed = _argmax_token(rows.index_fill(1, local, float("-inf")), first, tp)
        loss = tensor.vocab_parallel_cross_entropy(rows, targets, tp, plain=self.layout.kernels.plain)
        self._found = TokenScores(loss, predicted, allowed)
        return loss


def _argmax_token(rows: Tensor, first: int, tp: Group) -> Tensor:
    """Return the most likely tokens [n] of all tp ranks. `rows`: own logits [n, V/t] for token ids from `first` on."""
    largest, index = rows.float().max(1)
    best = largest.clone()
    tp.all_reduce(best, MAX, "evaluation").wait()
    # Among equal logits, the maximum over negated token ids selects the token with the smallest id.
    candidate = torch.where(largest == best, -(index + first), torch.iinfo(torch.int64).min)
    tp.all_reduce(candidate, MAX, "evaluation").wait()
    return -candidate


def _load_parameters(module: GPT, values: InitialValues, like: Tensor) -> None:
    """Allocate the parameters of a module, and copy their values from the weight files."""
    leave_meta(module, like.device, like.dtype)
    for i, parameter in enumerate(module.parameters()):
        data = torch.empty(parameter.shape, dtype=like.dtype, device=like.device)
        data.view(-1).copy_(values(i, 0, data.numel()))
        parameter.data = data
