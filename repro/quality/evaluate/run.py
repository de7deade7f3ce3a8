"""`repro evaluate`: check weights and text, score the text on ranks, and store a record with these metrics.

| metric | content |
|---|---|
| `perplexity.word` | WikiText: published perplexity per word of the original text |
| `perplexity.token`, `loss` | WikiText: perplexity and loss per token of the model |
| `tokens`, `words` | WikiText: number T of tokens and number To of original words in the text |
| `accuracy` | LAMBADA: share of samples with only correct predictions |
| `accuracy.filtered` | LAMBADA: accuracy if predictions exclude stop words, for a tokenizer that has words |
| `perplexity` | LAMBADA: perplexity per sample |
| `samples`, `truncated` | number of samples, and of samples without their first tokens, which exceed the context |
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from repro.config import ConfigError, Experiment, Layout, Limits, models
from repro.config.errors import require
from repro.launch import local_launch
from repro.launch.job import Interrupt, Job
from repro.launch.local_launch import run_once
from repro.measure.provenance import provenance
from repro.quality.evaluate.samples import (
    GPT2,
    LAMBADA,
    EvaluationProtocol,
    Samples,
    check_vocabulary,
    find_protocol,
    open_tokenizer,
    read_samples,
    read_stop_words,
)
from repro.quality.weights import open_weights
from repro.quality.weights.source import WeightSource
from repro.results.schema import EvaluationRecord
from repro.results.store import Store
from repro.util.files import sha256_digest

RANK_FUNCTION = "repro.quality.evaluate.rank:run_rank"
LIMITS = Limits(timeout_s=0, hang_s=600)
"""Time limits of an evaluation: none in total, and ten minutes without progress."""
SUITE_NAME = "evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of the command `repro evaluate`, which scores trained weights on a text."""

    weights: Path
    task: str
    data: Path
    protocol: str = ""
    """Name of the evaluation protocol; empty for the first protocol of the task."""
    tokenizer: str = ""
    stride: int = 0
    """Number of tokens between the starts of successive text windows; 0 for the stride of the protocol."""
    stop_words: Path | None = None
    model: str = ""
    """Name of a packaged model, for checkpoints that do not contain the number of heads."""
    system: str = "local"
    layout: Layout = field(default_factory=Layout)


def run_evaluation(options: EvaluationOptions, results: Path) -> tuple[EvaluationRecord, int]:
    """Run an evaluation, and return its stored record and the signal that stopped it (0 if none did).

    Invalid options raise `ConfigError` before the ranks start.
    """
    began, data = time.perf_counter(), options.data
    protocol = find_protocol(options.task, options.protocol)
    source = open_weights(options.weights, models.load_model(options.model) if options.model else None)
    source.check()
    experiment = _experiment(options, source)
    tokenizer = open_tokenizer(options.tokenizer, options.weights)
    samples = read_samples(data, protocol, tokenizer, source.model.seq, options.stride)
    check_vocabulary(map(int, samples.tokens), source.model.vocab)
    forbidden: list[int] = []
    if protocol.task == LAMBADA:
        forbidden = tokenizer.word_tokens(read_stop_words(options.stop_words))
    elif options.stop_words is not None:
        right = f"needs task {LAMBADA}, the only task with a score that excludes stop words"
        raise ConfigError("--stop-words", str(options.stop_words), says=right)
    where = provenance()
    with tempfile.TemporaryDirectory(prefix="repro-evaluate-") as folder, Interrupt() as interrupt:
        path = Path(folder) / "samples.npz"
        samples.save(path)
        weights = str(options.weights.resolve())
        task = {"weights": weights, "samples": str(path), "forbidden": forbidden}
        job = Job(experiments=[experiment], task=task)
        ending, found = run_once(job, interrupt, target=RANK_FUNCTION)
    rows = sorted(tuple(row) for rank in found for row in rank["samples"])
    done = ending.outcome == "ok" and len(rows) == len(samples.spans)
    lost = "" if ending.outcome != "ok" or done else "the ranks ended without scores of all samples"
    record = EvaluationRecord(
        suite=SUITE_NAME,
        name=f"{source.model.name}-{protocol.task}-{protocol.name}",
        model=asdict(source.model),
        weights={"kind": source.kind, "files": {path.name: sha256_digest(path) for path in source.files}},
        task=protocol.task,
        way=_protocol_with_deviations(protocol, options),
        data={"name": data.name, "bytes": data.stat().st_size, "sha256": sha256_digest(data)},
        tokenizer=dict(tokenizer.describe()),
        layout=asdict(experiment.layout),
        system=experiment.system,
        outcome="ok" if done else "error" if lost else ending.outcome,
        reason=lost or ending.reason,
        metrics=compute_metrics(protocol, samples, rows, filtered=bool(forbidden)) if done else {},
        provenance=where,
        wall_s=round(time.perf_counter() - began, 3),
    )
    with Store(results) as store:
        record = store.append(record)
    return record, interrupt.signal


def _experiment(options: EvaluationOptions, source: WeightSource) -> Experiment:
    """Return the experiment whose ranks score the samples; raise `ConfigError` for an unsupported layout or system."""
    layout = options.layout
    stages = "0 or 3, since an evaluation has no gradients and no optimizer states to partition"
    require(layout.zero in (0, 3), "zero", layout.zero, stages)
    no_sp = "false, since each tensor-parallel rank of an evaluation needs all scored tokens of a sample"
    require(not layout.sp, "sp", layout.sp, no_sp)
    no_bubble = "1 model chunk per pipeline stage, since forward passes alone have no pipeline bubble"
    require(layout.chunks == 1, "chunks", layout.chunks, no_bubble)
    vocab = -(-source.model.vocab // layout.tp) * layout.tp
    name, model = f"evaluate-{options.task}", replace(source.model, vocab=vocab)
    experiment = Experiment(name=name, model=model, layout=layout, system=options.system, limits=LIMITS)
    known = " or ".join(local_launch.DEVICES)
    is_local = options.system in local_launch.DEVICES
    require(is_local, "--system", options.system, f"{known}, since evaluations run on this machine")
    if lacking := local_launch.missing_resource(experiment):
        raise ConfigError("tp x pp x dp", layout.world, says=f"needs {lacking}")
    return experiment


def _protocol_with_deviations(protocol: EvaluationProtocol, options: EvaluationOptions) -> dict[str, Any]:
    """Return the fields of an evaluation protocol; the key `otherwise` contains the options that deviate from it."""
    otherwise: dict[str, Any] = {}
    if options.stride:
        otherwise["stride"] = options.stride
    if options.stop_words is not None:
        otherwise["stop_words"] = f"sha256 {sha256_digest(options.stop_words)}"
    return asdict(protocol) | ({"otherwise": otherwise} if otherwise else {})


def compute_metrics(
    protocol: EvaluationProtocol, samples: Samples, rows: Sequence[tuple[Any, ...]], *, filtered: bool
) -> dict[str, float]:
    """Return the metrics of an evaluation (accuracy or perplexity) from the scores of its samples."""
    total = math.fsum(row[1] for row in rows)
    found: dict[str, float] = {"samples": len(rows), "truncated": samples.truncated}
    if protocol.task == LAMBADA:
        found |= {"accuracy": sum(row[2] for row in rows) / len(rows), "perplexity": _exp(total / len(rows))}
        if filtered:
            found["accuracy.filtered"] = sum(row[3] for row in rows) / len(rows)
        return found
    tokens = len(samples.tokens)
    # The perplexity per word divides by all words in GPT-2's paper, and excludes the first word in Megatron-LM.
    words = samples.words if protocol.name == GPT2 else samples.words - 1
    return found | {
        "tokens": tokens,
        "words": samples.words,
        "loss": total / (tokens - 1),
        "perplexity.token": _exp(total / (tokens - 1)),
        "perplexity.word": _exp(total / words),
    }


def _exp(value: float) -> float:
    """Return exp(value), or the largest finite float if the result overflows."""
    return math.exp(value) if value < math.log(sys.float_info.max) else sys.float_info.max
