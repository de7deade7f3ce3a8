"""One evaluation: weights and text are looked at, ranks score, a record is made.

Metrics.  WikiText: `perplexity.word` is the published one, `perplexity.token` and `loss` are of the model's own tokens;
`tokens` T and `words` To are those of the text.  LAMBADA: `accuracy` is the share of samples with every prediction
right, `accuracy.filtered` that with stop words left out (where the tokenizer has words), `perplexity` that of what is
predicted of a sample.  `samples` are windows or texts, `truncated` those whose beginning did not fit the model.
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
from repro.launch import local_capacity
from repro.launch.job import Interrupt, Job
from repro.launch.local_launch import run_once
from repro.measure.provenance import provenance
from repro.quality.evaluate import protocols, texts
from repro.quality.evaluate.protocols import GPT2, LAMBADA, Protocol
from repro.quality.evaluate.texts import Samples
from repro.quality.evaluate.tokens import Tokenizer, check_vocabulary, open_tokenizer, stop_words
from repro.quality.weights.formats import open_weights
from repro.quality.weights.source import WeightSource
from repro.results.schema import EvaluationRecord
from repro.results.store import Store
from repro.util.files import sha256_digest

TARGET = "repro.quality.evaluate.rank:run_rank"
LIMITS = Limits(timeout_s=0, hang_s=600)
"""An evaluation takes as long as it takes; a pass takes no ten minutes."""
SUITE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be scored, and how, as the options of the command say it."""

    weights: Path
    task: str
    data: Path
    protocol: str = ""
    """Empty: Megatron-LM's."""
    tokenizer: str = ""
    stride: int = 0
    """0: the protocol's."""
    stop_words: Path | None = None
    model: str = ""
    """Of a checkpoint that does not say its sizes."""
    system: str = "local"
    layout: Layout = field(default_factory=Layout)


def evaluate(question: Question, results: Path) -> tuple[EvaluationRecord, int]:
    """The record, which is in the store, and the signal that stopped it (0 for none).

    Raises `ConfigError` before anything is started.
    """
    began = time.perf_counter()
    protocol = protocols.find(question.task, question.protocol)
    source = open_weights(question.weights, models.load_model(question.model) if question.model else None)
    source.check()
    experiment = _experiment(question, source)
    tokenizer = open_tokenizer(question.tokenizer, question.weights)
    samples = texts.read(question.data, protocol, tokenizer, source.model.seq, question.stride)
    check_vocabulary(map(int, samples.tokens), source.model.vocab)
    forbidden: list[int] = []
    if protocol.task == LAMBADA:
        forbidden = tokenizer.leading(stop_words(question.stop_words))
    elif question.stop_words is not None:
        right = f"is for {LAMBADA}, whose last words are no stop words"
        raise ConfigError("--stop-words", str(question.stop_words), says=right)
    where = provenance()
    with tempfile.TemporaryDirectory(prefix="repro-evaluate-") as folder, Interrupt() as interrupt:
        path = Path(folder) / "samples.npz"
        samples.save(path)
        weights = str(question.weights.resolve())
        job = Job(
            experiments=[experiment],
            task={"weights": weights, "samples": str(path), "forbidden": forbidden},
        )
        ending, found = run_once(job, interrupt, target=TARGET)
    rows = sorted(tuple(row) for rank in found for row in rank["samples"])
    done = ending.outcome == "ok" and len(rows) == len(samples.spans)
    lost = "" if ending.outcome != "ok" or done else "the ranks ended without a result"
    record = EvaluationRecord(
        suite=SUITE,
        name=f"{source.model.name}-{protocol.task}-{protocol.name}",
        model=asdict(source.model),
        weights={"kind": source.kind, "files": {path.name: sha256_digest(path) for path in source.files}},
        task=protocol.task,
        way=_way(protocol, question, tokenizer),
        data={
            "name": question.data.name,
            "bytes": question.data.stat().st_size,
            "sha256": sha256_digest(question.data),
        },
        tokenizer=dict(tokenizer.about()),
        layout=asdict(experiment.layout),
        system=experiment.system,
        outcome="ok" if done else "error" if lost else ending.outcome,
        reason=lost or ending.reason,
        metrics=metrics(protocol, samples, rows, filtered=bool(forbidden)) if done else {},
        provenance=where,
        wall_s=round(time.perf_counter() - began, 3),
    )
    with Store(results) as store:
        record = store.append(record)
    return record, interrupt.signal


def _experiment(question: Question, source: WeightSource) -> Experiment:
    """What a launch needs of it.  Raises `ConfigError` for a layout that evaluates nothing, or not here."""
    layout = question.layout
    none = "has no gradients and no optimizer to partition"
    require(layout.zero in (0, 3), "zero", layout.zero, f"0 or 3: an evaluation {none}")
    require(not layout.sp, "sp", layout.sp, "false: the head takes the tokens that count, wherever they are")
    require(
        layout.chunks == 1, "chunks", layout.chunks, "1: forward passes follow each other without a bubble"
    )
    vocab = -(-source.model.vocab // layout.tp) * layout.tp
    experiment = Experiment(
        name=f"evaluate-{question.task}",
        model=replace(source.model, vocab=vocab),
        layout=layout,
        system=question.system,
        limits=LIMITS,
    )
    known = " or ".join(local_capacity.DEVICES)
    require(
        question.system in local_capacity.DEVICES,
        "--system",
        question.system,
        f"{known}: it runs on this machine",
    )
    if lacking := local_capacity.missing_requirement(experiment):
        raise ConfigError("tp x pp x dp", layout.world, says=f"needs {lacking}")
    return experiment


def _way(protocol: Protocol, question: Question, tokenizer: Tokenizer) -> dict[str, Any]:
    """The protocol, and what was asked to be done otherwise."""
    otherwise: dict[str, Any] = {}
    if question.stride:
        otherwise["stride"] = question.stride
    if question.stop_words is not None:
        otherwise["stop_words"] = f"sha256 {sha256_digest(question.stop_words)}"
    return protocol.as_dict() | ({"otherwise": otherwise} if otherwise else {})


def metrics(
    protocol: Protocol, samples: Samples, rows: Sequence[tuple[Any, ...]], *, filtered: bool
) -> dict[str, float]:
    """The scores of all samples; rows as `repro.quality.evaluate.rank.score` gives them."""
    total = math.fsum(row[1] for row in rows)
    found: dict[str, float] = {"samples": len(rows), "truncated": samples.truncated}
    if protocol.task == LAMBADA:
        found |= {"accuracy": sum(row[2] for row in rows) / len(rows), "perplexity": _exp(total / len(rows))}
        if filtered:
            found["accuracy.filtered"] = sum(row[3] for row in rows) / len(rows)
        return found
    tokens = len(samples.tokens)
    # Megatron-LM takes the first of both off; GPT-2's authors divide by all words.
    words = samples.words if protocol.name == GPT2 else samples.words - 1
    return found | {
        "tokens": tokens,
        "words": samples.words,
        "loss": total / (tokens - 1),
        "perplexity.token": _exp(total / (tokens - 1)),
        "perplexity.word": _exp(total / words),
    }


def _exp(value: float) -> float:
    """A perplexity; that of weights which know nothing may be beyond all numbers, and is the largest one then."""
    return math.exp(value) if value < math.log(sys.float_info.max) else sys.float_info.max
