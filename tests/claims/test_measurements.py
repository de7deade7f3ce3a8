"""Tests of packaged claims with constructed measurements: the smoke suite, one device, and scores of weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from repro.claims.judge import judge_claim
from repro.claims.records import Records
from repro.claims.run_commands import device_commands, evaluation_commands
from repro.claims.verdicts import NOT_COMPARABLE, NOT_REPRODUCED, NOT_RUN, REPRODUCED, Finding, RowResult
from repro.config import Experiment, Layout, Model, models
from repro.results.reference_records import ReferenceFile
from repro.results.schema import EvaluationRecord, ExperimentRecord, Record, read_record
from repro.results.store import Store, read_records
from tests import committed
from tests.claims.constructed_records import RATIO, comparison, judged, record, row, value
from tests.records import fit_record, made_up

LEDGER = committed.ledger()
PSI = 1_000_003


def states(nd: int, stage: int) -> float:
    """Return the model-state bytes of a rank; each partitioned state is padded to a multiple of `nd` elements."""
    shard = -(-PSI // nd)
    optimizer, gradients, weights = (shard if stage >= first else PSI for first in (1, 2, 3))
    return 12 * optimizer + 2 * gradients + 2 * weights


def smoke(**wrong: float) -> list[ExperimentRecord]:
    """Return the smoke records of a correct implementation, with the model-state bytes in `wrong` by experiment."""
    records = []
    for nd in (1, 2, 4):
        ring = 2 * (nd - 1) / nd  # sent elements per reduced element, 2 bytes each
        for stage in (0, 1, 2, 3):
            metrics = {
                "parameters": PSI,
                "memory.states_bytes": states(nd, stage),
                "comm.sent_bytes": 2 * PSI * ring * (1.5 if stage == 3 else 1) + 8,
            }
            name = f"states-z{stage}-dp{nd}"
            metrics |= {"memory.states_bytes": wrong[name]} if name in wrong else {}
            records.append(record(f"smoke/{name}", **metrics))
        if nd > 1:
            sent = {"comm.sent_bytes": 2 * PSI * ring * 1.5 + 8}
            records.append(record(f"smoke/comm-z1-allreduce-dp{nd}", **sent))
    return records


def test_smoke_records_of_a_correct_implementation_reproduce() -> None:
    memory, traffic = ("zero-mem-formula-stages", "ds-4x-memory"), ("dp-2psi", "posg-2psi", "posgp-3psi")
    for claim_id in (*memory, *(f"zero-comm-{name}" for name in traffic)):
        result = judge_claim(LEDGER.claim(claim_id), Records(smoke()))
        assert (result.verdict, result.disagreements) == (REPRODUCED, ())
        assert result.basis.startswith("measured, scaled twin")


def test_incorrect_model_states_are_not_reproduced() -> None:
    for name, bytes_wrong in (
        ("states-z1-dp4", states(4, 1) + PSI),  # one additional byte per parameter
        ("states-z2-dp2", states(2, 1)),  # gradients not partitioned
        ("states-z3-dp4", states(4, 3) * 1.01),
        ("states-z0-dp1", states(1, 0) + 1),  # one additional byte; one rank has no padding
    ):
        records = smoke(**{name: bytes_wrong})
        result = judge_claim(LEDGER.claim("zero-mem-formula-stages"), Records(records))
        assert result.verdict == NOT_REPRODUCED
        assert result.disagreements, "the closed form agrees with the paper"


def test_parity_compares_every_layout_with_one_process() -> None:
    names = [row.variables["experiment"] for row in LEDGER.claim("repro-parity").rows]
    records = [record("smoke/parity-single", **{"loss.last": 3.0})]
    records += [record(str(name), **{"loss.last": 3.00001}) for name in names]
    result = judge_claim(LEDGER.claim("repro-parity"), Records(records))
    assert (result.verdict, len(result.rows)) == (REPRODUCED, 17)
    records[-1].metrics["loss.last"] = 3.0001
    result = judge_claim(LEDGER.claim("repro-parity"), Records(records))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 16/17")


def test_zero_3_gathered_bytes_do_not_grow_with_depth() -> None:
    claim = LEDGER.claim("zero-dynamic-schedule")
    claim = replace(claim, rows=claim.rows[:1])
    for at_32, verdict in ((2, REPRODUCED), (3, NOT_REPRODUCED)):
        layers = {"gathered-l2": 2, "gathered-l8": 2, "gathered-l32": at_32}
        records = [record(f"smoke/{name}", **{"memory.gathered_bytes": n}) for name, n in layers.items()]
        assert judge_claim(claim, Records(records)).verdict == verdict


def test_all_reduces_per_layer_are_compared_exactly() -> None:
    calls = "comm.per_layer.tp.all_reduce.calls"
    for claim_id, name, expected in (
        ("meg1-allreduce-count", "parity-tp2", 4),
        ("zero-comm-megatron-block", "recompute-tp2", 6),
    ):
        for calls_seen, verdict in ((expected, REPRODUCED), (expected + 0.5, NOT_REPRODUCED)):
            records = [record(f"smoke/{name}", **{calls: calls_seen})]
            result = judge_claim(LEDGER.claim(claim_id), Records(records))
            finding = next(f for f in result.rows[0].findings if f.kind == "measured")
            assert finding.verdict == verdict


LIMIT, FIG4, STATES = "zero-ddp-oom-limit", "zero-table10-fig4-dp-only", "zero-fig1-7p5b"
KERNELS = ("repro-kernels", "vocabulary padded to 50,304")


def reference(*records: Record, device: str = "NVIDIA H200") -> ReferenceFile:
    return ReferenceFile("f", device, "2026-11-26", records)


def measured(claim: str, label: str, *records: Record, files: tuple[ReferenceFile, ...] = ()) -> Finding:
    result = judge_claim(LEDGER.claim(claim), Records(records, files))
    rows = (row for row in result.rows if row.row.label == label)
    (finding,) = (finding for row in rows for finding in row.findings if finding.kind == "measured")
    return finding


def test_search_of_one_rank_decides_a_limit() -> None:
    found = measured(LIMIT, "text", fit_record())
    assert (found.verdict, found.text) == (REPRODUCED, "1.498B")
    assert found.scale_label == "one rank of 64, on NVIDIA V100"
    assert found.reason.endswith("; 46 layers fit with 30 GB reserved, 47 layers do not fit")
    assert measured(LIMIT, "README, memory efficiency: with 1.5B", fit_record()).value == "oom"
    result = judge_claim(LEDGER.claim(LIMIT), Records([fit_record()]))
    fails_beyond = {row.row.published: row.verdict for row in result.rows if "fails beyond" in row.row.label}
    assert fails_beyond == {"1.3B": NOT_REPRODUCED, "1B": NOT_REPRODUCED}, "46 layers are 1.498B"
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, one rank of 64, on NVIDIA V100 2/5")
    largest = measured(FIG4, "largest without MP", fit_record(hidden=4096, layers=63, zero=2, cb=True))
    assert largest.text == "12.9B"
    all_ranks = replace(fit_record(limit_bytes=32 * 2**30), one_rank=False, rank=None, collectives="data")
    found = measured(LIMIT, "text", all_ranks)  # memory of 32 GiB counts as 32 GB
    assert (found.verdict, found.scale_label) == (REPRODUCED, "published scale, on NVIDIA V100")
    assert measured(LIMIT, "measured (Table 2)", fit_record(layers=49)).verdict == NOT_REPRODUCED
    assert measured(LIMIT, "text", fit_record(layers=30)).verdict == NOT_REPRODUCED


def test_search_with_another_condition_is_ignored() -> None:
    for change in (
        *({"zero": 1}, {"hidden": 1920}, {"ranks": 8}, {"cb": True}, {"fails": "hang"}, {"system": "local"}),
        *({"limit_bytes": 31_000_000_000}, {"limit_bytes": 40_000_000_000}),
    ):
        found = measured(LIMIT, "text", fit_record(**change))
        assert found.verdict == NOT_RUN
        (command,) = device_commands(LEDGER.claim(LIMIT))
        assert f"`{command.text}`" in found.reason
        search = "repro fit --measure --system local-gpu --gpus 1 --as-rank 0 --of 64 --zero 0 --no-cb"
        assert command.text.startswith(search)
        assert command.text.endswith("--hidden 1600 --micro-batch 1 --memory-limit 32GB")


@pytest.mark.parametrize(("zero", "size"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_one_rank_are_measured(zero: int, size: float) -> None:
    states = {"parameters": int(size * 5e8), "gradients": 0, "optimizer": int(size * 5e8)}
    fit = fit_record(zero=zero, cb=True, states=states, model=models.load_model("table1-7.5b"))
    label = ("baseline DP", "P_os", "P_os+g", "P_os+g+p")[zero]
    found = measured(STATES, label, fit)
    assert (found.verdict, found.value) == (REPRODUCED, pytest.approx(size))
    assert measured(STATES, label, replace(fit, ranks=64, largest=None)).verdict == NOT_RUN
    assert "--model table1-7.5b --search micro-batch" in measured(STATES, label).reason
    assert len(device_commands(LEDGER.claim(STATES))) == 4
    assert device_commands(LEDGER.claim("zero-any-size")) == []


def run(
    kernels: str,
    speed: float,
    *,
    suite: str = "one_gpu",
    system: str = "local-gpu",
    layers: int = 48,
    **keys: Any,
) -> Record:
    model = Model(name="m", layers=layers, hidden=1600, heads=25, vocab=50304, seq=1024)
    layout = Layout(micro_batch=8, global_batch=16, precision="bf16", kernels=kernels)
    experiment = Experiment(name=kernels, model=model, layout=layout, system=system).as_dict()
    return made_up(kernels, suite=suite, experiment=experiment, metrics={"samples_per_s": speed}, **keys)


def test_compared_kernel_runs_differ_only_in_their_kernels() -> None:
    pair = [run("fused", 47.0), run("reference", 40.0)]
    found = measured(*KERNELS, *pair)
    assert (found.verdict, found.value) == (REPRODUCED, 1.175)
    assert measured(*KERNELS, run("fused", 40.0), run("reference", 47.0)).verdict == NOT_REPRODUCED
    for other in (
        run("reference", 40.0, suite="other"),
        run("reference", 40.0, system="local"),
        run("reference", 40.0, provenance={"host": "another"}),
        run("reference", 40.0, outcome="oom"),
    ):
        assert measured(*KERNELS, pair[0], other).verdict == NOT_RUN
    shallow = [run("fused", 47.0, layers=24), run("reference", 40.0, layers=24)]
    assert measured(*KERNELS, *shallow).verdict == NOT_RUN
    found = measured(*KERNELS, *pair, comparison("fused", "reference", 1.2, 1.1, 1.3, suite="one_gpu"))
    assert (found.value, found.low, found.high) == (1.2, 1.1, 1.3)


def test_reference_records_decide_until_this_machine_has_a_result() -> None:
    files = (reference(fit_record(device="NVIDIA H200")),)
    found = measured(LIMIT, "text", files=files)
    assert (found.verdict, found.is_reference) == (REPRODUCED, True)
    assert found.scale_label == "one rank of 64, as measured on NVIDIA H200, 2026-11-26"
    failed = measured(LIMIT, "text", fit_record(fails="hang", layers=40), files=files)
    assert (failed.is_reference, failed.text) == (True, "1.498B")
    own = measured(LIMIT, "text", fit_record(layers=44), files=files)
    assert (own.is_reference, own.text) == (False, "1.436B")  # 12 l h^2 + 13 l h + (V + s) h
    assert own.scale_label == "one rank of 64, on NVIDIA V100"


def test_value_reads_records_of_one_machine_only(tmp_path: Path) -> None:
    """A local run of one side and a reference run of the other side give no ratio."""
    rows, own = row(simulated=value(RATIO)), record("a", samples_per_s=2.0)
    half = reference(record("b", samples_per_s=1.0))
    both = reference(record("a", samples_per_s=6.0), record("b", samples_per_s=3.0), device="NVIDIA A100")
    assert judged(tmp_path, rows, own, references=[half]).verdict == NOT_RUN
    result = judged(tmp_path, rows, own, references=[half, both])
    assert result.basis == "measured, published scale, as measured on NVIDIA A100, 2026-11-26 1/1"


GPT2 = asdict(models.load_model("gpt2-1.5b"))


def scored(
    protocol: str, task: str = "lambada", model: dict[str, Any] = GPT2, **metrics: float
) -> EvaluationRecord:
    parts = {
        "data": {},
        "tokenizer": {},
        "layout": {},
        "weights": {"kind": "Hugging Face GPT-2", "files": {}},
    }
    texts = {"suite": "evaluate", "system": "local", "outcome": "ok", "reason": "", "task": task}
    name, way = f"somebody's-{task}-{protocol}", {"name": protocol}
    scores = {name.replace("_", "."): value for name, value in metrics.items()}
    return EvaluationRecord(**texts, **parts, name=name, model=model, way=way, metrics=scores)


def row_result(claim: str, label: str, *records: Record) -> RowResult:
    result = judge_claim(LEDGER.claim(claim), Records(records))
    return next(row for row in result.rows if row.row.label == label)


def lambada(*records: Record) -> RowResult:
    return row_result("tnlg-lambada", "GPT-2 1.5B", *records)


def test_reason_of_a_missing_record_names_the_command() -> None:
    found = lambada()
    assert found.verdict == NOT_RUN
    command = "`repro evaluate --weights DIR --task lambada --protocol gpt2 --data FILE`"
    assert command in found.findings[0].reason
    claim = LEDGER.claim("tnlg-lambada")
    assert [command.text.split()[7] for command in evaluation_commands(claim)] == ["megatron", "gpt2"]


def test_unreleased_weights_are_not_comparable_without_a_record() -> None:
    assert row_result("tnlg-lambada", "Turing-NLG 17B").verdict == NOT_COMPARABLE
    evaluation = scored("megatron", model=asdict(models.load_model("turing-nlg-17b")), accuracy=0.6798)
    assert row_result("tnlg-lambada", "Turing-NLG 17B", evaluation).verdict == REPRODUCED


def test_newest_filtered_accuracy_is_compared_with_the_published_one() -> None:
    """Vocabularies may be padded."""
    found = lambada(scored("gpt2", accuracy=0.1, accuracy_filtered=0.6324))
    assert (found.verdict, found.basis) == (REPRODUCED, "measured, published scale")
    assert lambada(scored("gpt2", accuracy=0.1, accuracy_filtered=0.5266)).verdict == NOT_REPRODUCED
    padded = {**GPT2, "vocab": 50304, "ffn": 6400}
    new = replace(scored("gpt2", model=padded, accuracy_filtered=0.6324), written="2026-01-02")
    old = replace(scored("gpt2", accuracy_filtered=0.1), written="2026-01-01")
    assert lambada(new, old).verdict == REPRODUCED
    text = replace(scored("gpt2"), metrics={"accuracy.filtered": "63.24"})  # type: ignore[dict-item]
    for evaluation in (text, scored("gpt2", accuracy=0.5)):
        assert "no metric accuracy.filtered" in lambada(evaluation).findings[0].reason


def test_evaluation_of_another_protocol_task_or_model_is_ignored() -> None:
    for other in (
        scored("megatron", accuracy_filtered=0.6324),
        scored("gpt2", task="wikitext103", accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "layers": 36}, accuracy_filtered=0.6324),
        replace(scored("gpt2", accuracy_filtered=0.6324), outcome="oom"),
        scored("gpt2", model={"layers": 48}, accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "heads": 7}, accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "experts": 8}, accuracy_filtered=0.6324),
    ):
        assert lambada(other).verdict == NOT_RUN


def test_token_and_word_counts_must_be_equal() -> None:
    right = scored("megatron", "wikitext103", tokens=270_329, words=245_566)
    for label in ("tokens T of the test set", "original tokens To"):
        assert row_result("meg1-quality", label, right).verdict == REPRODUCED
    wrong = scored("megatron", "wikitext103", tokens=270_330, words=245_566)
    assert row_result("meg1-quality", "tokens T of the test set", wrong).verdict == NOT_REPRODUCED


def test_evaluation_record_is_equal_after_a_store(tmp_path: Path) -> None:
    record = scored("gpt2", accuracy=0.5)
    with Store(tmp_path) as store:
        store.append(record)
    (stored,) = read_records(tmp_path)
    assert replace(stored, sequence=None) == record == read_record(record.as_dict())
