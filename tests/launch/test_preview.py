"""Tests of `repro run --dry-run`: state, location and estimated time of each experiment."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from repro import cli, engines
from repro.config import ConfigError, suites
from repro.config.suites import load_suite
from repro.launch.run import preview_run
from repro.results.store import Store
from tests.launch.runs import experiments, write_suite
from tests.records import changed, made_up

CLUSTER = '[suite]\nname = "o"\n[[experiment]]\nname = "far"\nmodel = "gpt2-1.5b"\nsystem = "dgx2"\nlayout.dp = 16\n'


TORCH_EXPERIMENT = '[[experiment]]\nname = "torch"\nengine = "torch"\nlayout.zero = 1\n'


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert cli.main(["run", *arguments, "--dry-run", "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_dry_run_lists_state_location_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "o.toml").write_text(CLUSTER)
    results = tmp_path / "results"
    known = load_suite(Path("smoke")).entry("states-z0-dp2").experiment
    with Store(results) as store:
        record = made_up("states-z0-dp2", suite="smoke")
        store.append(changed(record, key=known.key, wall_s=12.5))
        store.append(made_up("states-z3-dp2", suite="another", key="other", wall_s=99.0))
    before = sorted(results.rglob("*"))
    found = dry_run(capsys, "smoke", "--only", "states-z[03]-dp2", "--results", str(results))
    assert [(row["name"], row["state"], row["where"], row["last_s"]) for row in found] == [
        ("states-z0-dp2", "in the store", "2 ranks here", 12.5),
        ("states-z3-dp2", "to run", "2 ranks here", None),
    ]
    (far,) = dry_run(capsys, str(tmp_path / "o.toml"), "--results", str(results))
    assert (far["state"], far["name"]) == ("not here", "far")
    assert str(far["where"]).startswith("needs 16 GPUs of system dgx2")
    both = dry_run(
        capsys, "smoke", str(tmp_path / "o.toml"), "--evidence", "simulated", "--results", str(results)
    )
    assert {row["suite"] for row in both} == {"smoke", "o"}
    assert both[-1]["where"] == "16 ranks of dgx2, simulated here"
    assert sorted(results.rglob("*")) == before


def test_preview_contains_steps_and_time_limits(tmp_path: Path) -> None:
    body = experiments("a", "known") + experiments("far", extra='system = "dgx2"\nlayout.dp = 16\n')
    suite = write_suite(tmp_path, body + TORCH_EXPERIMENT, limits="timeout_s = 7")
    keys = {entry.experiment.name: entry.experiment.key for entry in load_suite(suite).entries}
    with Store(tmp_path / "results") as store:
        for evidence, seconds in (("measured", 3.0), ("simulated", 4.0)):
            record = made_up("known", suite="faults", key=keys["known"], evidence=evidence, wall_s=seconds)
            store.append(record)

    def preview(evidence: str, system: str = "", rerun: bool = False) -> list[tuple[object, ...]]:
        return [
            astuple(row)[1:7]
            for row in preview_run([suite], [], tmp_path / "results", rerun, evidence, system)
        ]

    hint = "needs 16 GPUs of system dgx2; `--evidence simulated` simulates the experiment here"
    far = ("far", "not here", hint, 6, None, 7.0)
    a, known = (
        ("a", "to run", "2 ranks here", 6, None, 7.0),
        ("known", "in the store", "2 ranks here", 6, 3.0, 7.0),
    )
    torch = ("torch", "to run", "2 ranks here", 6, None, 7.0)
    assert preview("measured") == [a, known, far, torch]
    assert preview("measured", rerun=True)[1] == ("known", "to run", *known[2:])
    location = "2 ranks of local, simulated here"
    needs_native = "needs engine native: only native steps can be simulated"
    assert preview("simulated") == [
        ("a", "to run", location, 1, None, 0.0),
        ("known", "to run", location, 1, 4.0, 0.0),  # the record has another system description
        ("far", "to run", "16 ranks of dgx2, simulated here", 1, None, 0.0),
        ("torch", "not here", needs_native, 1, None, 0.0),
    ]
    on_selene = preview("simulated", "selene")
    assert on_selene[0] == ("a@selene", "to run", "2 ranks of selene, simulated here", 1, None, 0.0)


def test_rerun_lists_recorded_experiments_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = load_suite(Path("smoke")).entry("states-z0-dp2").experiment
    with Store(tmp_path) as store:
        store.append(changed(made_up("states-z0-dp2", suite="smoke"), key=known.key, wall_s=2.0))
    arguments = [
        "run",
        "smoke",
        "--only",
        "states-z0-dp2",
        "--results",
        str(tmp_path),
        "--dry-run",
        "--rerun",
    ]
    assert cli.main(arguments) == 0
    message = capsys.readouterr().out.splitlines()
    assert message[:2] == [
        "1 experiment: 1 to run, 0 in the store, 0 not here.",
        "Estimated time: 2 s for 1 experiment by the times of their last runs.",
    ]


def test_experiments_without_records_have_no_estimated_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = load_suite(Path("smoke")).entry("states-z0-dp2").experiment.training.steps
    for evidence, row in (
        ("measured", f"states-z0-dp2 to run 2 ranks here {steps} – 300"),
        ("simulated", "states-z0-dp2 to run 2 ranks of local, simulated here 1 – –"),
    ):
        arguments = ["run", "smoke", "--only", "states-z0-dp2", "--results", str(tmp_path), "--dry-run"]
        assert cli.main([*arguments, "--details", "--evidence", evidence]) == 0
        message = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert message[1] == "Estimated time: no estimate for 1 experiment without a record."
        assert message[-1] == row


def test_dry_run_counts_experiments_for_other_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = load_suite(Path("zero_throughput")).entries
    assert cli.main(["run", "zero_throughput", "--dry-run", "--results", str(tmp_path)]) == 0
    message = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    here = [entry for entry in entries if entry.experiment.system == "local"]
    wide = [entry for entry in entries if entry.experiment.layout.world == 128]
    far = len(entries) - len(here)
    assert message[0] == f"{len(entries)} experiments: {len(here)} to run, 0 in the store, {far} not here."
    assert f"not run: {len(wide)} experiments: needs 128 GPUs of system dgx2." in message
    assert f"`--evidence simulated` can simulate {far} of these experiments on this machine." in message
    steps = sum(entry.experiment.training.steps for entry in here)
    assert f"4 ranks here {len(here)} {steps}" in message


def test_suites_are_found_by_name() -> None:
    assert load_suite(Path("smoke")).name == "smoke"
    assert "yuan" in suites.SUITES.names()
    with pytest.raises(ConfigError, match="suite = 'smok': unknown suite; did you mean smoke"):
        load_suite(Path("smok"))


def test_brackets_in_names_and_messages_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would treat `[engines]` in `pip install -e '.[engines]'` as a style and omit it."""
    monkeypatch.setattr(engines, "missing_library", lambda engine: "b: pip install -e '.[engines]'")
    (tmp_path / "o.toml").write_text(
        '[suite]\nname = "o"\n[[experiment]]\nname = "a[1]"\nmodel = "gpt2-tiny"\n'
    )
    assert cli.main(["run", str(tmp_path / "o.toml"), "--dry-run", "--details"]) == 0
    message = capsys.readouterr().out
    assert "a[1]" in message
    assert ".[engines]" in message
