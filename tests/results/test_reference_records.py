"""Tests of reference records: a new file is loaded, an invalid file is an error, and `repro run` reads none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.config import ConfigError
from repro.results import reference_records, select
from repro.results.reference_records import load_reference, write_reference
from repro.results.schema import ExperimentRecord, FitRecord
from repro.results.store import Store
from tests.claims.constructed_records import conditions
from tests.records import fit_record, made_up

GPU = {
    "gpus": [{"name": "NVIDIA V100"}],
    "environment": {"SLURM_JOB_ID": "7"},
    "packages": {"torch": "2", "numpy": "1"},
}


def on(system: str, name: str, **keys: Any) -> ExperimentRecord:
    keys = {"provenance": GPU, "written": "2027-01-02T03:04:05Z", **keys}
    return made_up(name, experiment=conditions(system=system), **keys)


def write(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_every_file_in_the_folder_is_loaded(tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl",
        on("local-gpu", "one").as_dict(),
        on("local-gpu", "failed", outcome="oom", provenance={}).as_dict(),
    )
    write(tmp_path / "b.jsonl", fit_record(device="NVIDIA A100", written="2027-02-03T00:00:00Z").as_dict())
    newest, oldest = load_reference(tmp_path)
    assert (newest.label, oldest.label) == ("NVIDIA A100, 2027-02-03", "NVIDIA V100, 2027-01-02")
    assert [record.name for record in oldest.records] == ["one", "failed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: must be a record of a measurement: Expecting"),
        ("[]", "line 2: must be a record of a measurement"),
        ('{"kind": "experiment"}', "line 2: must be a record of a measurement: (schema: missing|suite)"),
        (json.dumps(on("dgx2", "s", evidence="simulated").as_dict()), "line 2: must be a measured record"),
        (
            json.dumps(fit_record(device="NVIDIA A100").as_dict()),
            "device = 'NVIDIA A100, NVIDIA V100': must be one device",
        ),
    ],
    ids=["torn", "list", "keys", "simulated", "two devices"],
)
def test_invalid_files_are_a_one_line_error(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", on("local-gpu", "one").as_dict())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_reference(tmp_path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_store_is_exported_as_a_reference_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export omits runs on CPUs, environment variables, series except the loss, and most ranks' memory."""
    assert cli.main(["export", "--table", "reference"]) == 2
    assert "--output = '': must be a file" in capsys.readouterr().err
    ranks = [{"rss_peak_bytes": rank, "cuda": {}} for rank in (1, 2, 3)]
    with Store(tmp_path / "results") as store:
        store.append(on("local-gpu", "one", memory_by_rank=ranks, series={"loss": [2.0], "grad_norm": [1.0]}))
        store.append(on("local", "on a processor"))
        store.append(on("local-gpu", "hangs", outcome="hang"))
        store.append(fit_record(device="NVIDIA V100"))
    out = tmp_path / "v100.jsonl"
    command = ["export", "--table", "reference", "--results", str(tmp_path / "results"), "--output", str(out)]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"2 records in {out}.\n"
    (file,) = load_reference(tmp_path)
    one, fit = file.records
    assert isinstance(one, ExperimentRecord)
    assert isinstance(fit, FitRecord)
    assert (one.name, len(one.memory_by_rank)) == ("one", 1)
    assert (one.series.loss, one.series.grad_norm) == ([2.0], None)
    assert one.provenance == {"gpus": GPU["gpus"], "packages": {"torch": "2"}}
    assert "SLURM" not in out.read_text()


def test_reference_file_has_one_model_of_gpu_or_processor(tmp_path: Path) -> None:
    two_models = on("local-gpu", "one"), fit_record(device="NVIDIA A100")
    for records in (two_models, [on("local", "names no processor", provenance={})]):
        with pytest.raises(ConfigError, match="of one GPU or processor model"):
            write_reference(records, tmp_path / "x.jsonl")
    processor = {"cpu": {"model": "AMD EPYC", "cores": 2}, "gpus": []}
    write_reference([on("local", "on a processor", provenance=processor)], tmp_path / "x.jsonl")
    (file,) = load_reference(tmp_path)
    assert file.label == "AMD EPYC, 2027-01-02"
    assert file.records[0].provenance["cpu"] == {"model": "AMD EPYC"}


def test_packaged_reference_files_are_small_and_current() -> None:
    paths = list(reference_records.REFERENCE_DIRECTORY.glob("*.jsonl"))
    assert sum(path.stat().st_size for path in paths) < 200_000
    files = load_reference()
    assert [len(file.records) > 0 for file in files] == [True] * len(paths)
    assert all(select.of_today(record) for file in files for record in file.records)
    assert any(isinstance(record, FitRecord) for file in files for record in file.records)


def test_a_fit_search_never_counts_as_a_run(tmp_path: Path) -> None:
    """`repro run` of the experiment finds no record and runs the experiment."""
    with Store(tmp_path) as store:
        stored = store.append(fit_record(device="NVIDIA V100"))
        (read,) = store.records()
    assert read.as_dict() == json.loads(json.dumps(stored.as_dict()))
    assert select.by_key([read]) == {}
    chosen = select.select([read])
    assert (chosen.measured, chosen.fits) == ([], [read])
