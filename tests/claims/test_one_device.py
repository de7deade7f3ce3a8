"""Tests of claims that one device tests: limits of one rank of N, kernels, and records of reference machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repro.claims.judge import judge_claim
from repro.claims.records import Records
from repro.claims.run_commands import device_commands
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED, Finding
from repro.config import Experiment, Layout, Model, models
from repro.results.reference_records import ReferenceFile
from repro.results.schema import Record
from tests import committed
from tests.claims.constructed_records import RATIO, comparison, judged, record, row, value
from tests.records import fit_record, made_up

LIMIT, FIG4, STATES = "zero-ddp-oom-limit", "zero-table10-fig4-dp-only", "zero-fig1-7p5b"
KERNELS = ("repro-kernels", "vocabulary padded to 50,304")


def reference(*records: Record, device: str = "NVIDIA H200") -> ReferenceFile:
    return ReferenceFile("f", device, "2026-11-26", records)


def measured(claim: str, label: str, *records: Record, files: tuple[ReferenceFile, ...] = ()) -> Finding:
    result = judge_claim(committed.ledger().claim(claim), Records(records, files))
    rows = (row for row in result.rows if row.row.label == label)
    (finding,) = (finding for row in rows for finding in row.findings if finding.kind == "measured")
    return finding


def test_search_of_one_rank_decides_a_limit() -> None:
    found = measured(LIMIT, "text", fit_record())
    assert (found.verdict, found.text) == (REPRODUCED, "1.498B")
    assert found.scale_label == "one rank of 64, on NVIDIA V100"
    assert found.reason.endswith("; 46 layers fit with 30 GB reserved, 47 layers do not fit")
    assert measured(LIMIT, "README, memory efficiency: with 1.5B", fit_record()).value == "oom"
    result = judge_claim(committed.ledger().claim(LIMIT), Records([fit_record()]))
    fails_beyond = {row.row.published: row.verdict for row in result.rows if "fails beyond" in row.row.label}
    assert fails_beyond == {"1.3B": NOT_REPRODUCED, "1B": NOT_REPRODUCED}, "46 layers are 1.498B"
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, one rank of 64, on NVIDIA V100 2/5")
    largest = measured(FIG4, "largest without MP", fit_record(hidden=4096, layers=63, zero=2, cb=True))
    assert largest.text == "12.9B"


@pytest.mark.parametrize(
    "change",
    [
        {"zero": 1},
        {"hidden": 1920},
        {"ranks": 8},
        {"cb": True},
        {"fails": "hang"},
        {"limit_bytes": 31_000_000_000},
        {"limit_bytes": 40_000_000_000},
        {"system": "local"},
    ],
)
def test_search_with_another_condition_is_ignored(change: dict[str, Any]) -> None:
    found = measured(LIMIT, "text", fit_record(**change))
    assert found.verdict == NOT_RUN
    assert (
        "`repro fit --measure --system local-gpu --gpus 1 --as-rank 0 --of 64 --zero 0 --no-cb"
        in found.reason
    )
    assert "--hidden 1600 --micro-batch 1 --memory-limit 32GB`" in found.reason


def test_search_with_all_ranks_has_the_published_scale() -> None:
    """Memory of 32 GiB counts as 32 GB."""
    full = replace(fit_record(limit_bytes=32 * 2**30), one_rank=False, rank=None, collectives="data")
    found = measured(LIMIT, "text", full)
    assert (found.verdict, found.scale_label) == (REPRODUCED, "published scale, on NVIDIA V100")


def test_limit_far_from_the_published_one_is_not_reproduced() -> None:
    assert measured(LIMIT, "measured (Table 2)", fit_record(layers=49)).verdict == NOT_REPRODUCED
    assert measured(LIMIT, "text", fit_record(layers=30)).verdict == NOT_REPRODUCED


@pytest.mark.parametrize(("zero", "size"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_one_rank_are_measured(zero: int, size: float) -> None:
    states = {"parameters": int(size * 5e8), "gradients": 0, "optimizer": int(size * 5e8)}
    fit = fit_record(zero=zero, cb=True, states=states, model=models.load_model("table1-7.5b"))
    label = ("baseline DP", "P_os", "P_os+g", "P_os+g+p")[zero]
    found = measured(STATES, label, fit)
    assert (found.verdict, found.value) == (REPRODUCED, pytest.approx(size))
    assert measured(STATES, label, replace(fit, ranks=64, largest=None)).verdict == NOT_RUN
    assert "--model table1-7.5b --search micro-batch" in measured(STATES, label).reason


def run(
    kernels: str, speed: float, *, suite: str = "one_gpu", system: str = "local-gpu", **keys: Any
) -> Record:
    model = Model(name="m", layers=48, hidden=1600, heads=25, vocab=50304, seq=1024)
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


def test_interleaved_kernels_have_an_interval() -> None:
    interleaved = comparison("fused", "reference", 1.2, 1.1, 1.3, suite="one_gpu")
    found = measured(*KERNELS, run("fused", 47.0), run("reference", 40.0), interleaved)
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


def test_device_commands_create_the_missing_records() -> None:
    (fit,) = device_commands(committed.ledger().claim(LIMIT))
    assert fit.text.startswith(
        "repro fit --measure --system local-gpu --gpus 1 --as-rank 0 --of 64 --zero 0 --no-cb"
    )
    assert len(device_commands(committed.ledger().claim(STATES))) == 4
    assert device_commands(committed.ledger().claim("zero-any-size")) == []
