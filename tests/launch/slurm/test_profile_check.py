"""Tests of `repro doctor --profile` on a fake cluster: passed and failed checks of a profile."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from repro import cli
from repro.launch.slurm import profile
from repro.launch.slurm.submission import probe
from tests.launch.slurm.conftest import FakeSlurm


def examine(
    path: Path, results: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, str]]:
    code = cli.main(["doctor", "--profile", str(path), "--results", str(results), "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    return code, {check["name"]: f"{check['state']}: {check['found']}" for check in document["checks"]}


def test_valid_profile_passes(
    slurm: FakeSlurm, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = examine(site, tmp_path / "results", capsys)
    assert code == 0
    assert checks["partition"] == "yes: debug: 4 nodes, time limit 02:00:00"
    assert checks["request"].startswith("yes")


def test_options_that_bind_gpus_are_reported(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[slurm]\ngpus_per_node = 4\n")
    _, checks = examine(path, tmp_path / "results", capsys)
    assert "GPU binding" not in checks
    path.write_text('[slurm]\ngpus_per_node = 4\noptions = { gpu-bind = "single:1" }\n')
    _, checks = examine(path, tmp_path / "results", capsys)
    assert checks["GPU binding"].startswith("limited: gpu-bind = single:1")


def test_case_classes_have_separate_checks(
    slurm: FakeSlurm, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ("a*", 'partition = "nowhere"'),
        ("b*", 'time_limit = "3:00:00"'),
        ("c*", 'partition = "short"\ntime_limit = "9"'),
    ]
    text = "".join(f'[[case]]\nmatch = "{match}"\n{more}\n' for match, more in rows)
    site.write_text(site.read_text() + text)
    code, checks = examine(site, tmp_path / "results", capsys)
    assert code == 0, "other cases can be submitted"
    assert "known are debug, old, short" in checks["case a*"]
    assert checks["case b*"] == "limited: debug: 4 nodes, time limit 02:00:00; case b*.time_limit is 3:00:00"
    assert checks["case c*"].startswith("yes: short")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ('partition = "nowhere"', "partition", "known are debug, old, short"),
        ('partition = "short"', "partition", "slurm.time_limit is 01:00:00"),
        ("gpus_per_node = 17", "GPUs", "16 per node, v100; slurm.gpus_per_node is 17"),
        ('gpus_per_node = 4\ngpu_type = "a100"', "GPUs", "slurm.gpu_type is a100"),
    ],
)
def test_failed_check_names_the_wrong_key(
    slurm: FakeSlurm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    name: str,
    message: str,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[slurm]\n{text}\n")
    code, checks = examine(path, tmp_path / "results", capsys)
    assert code == 1
    assert checks[name].startswith("no")
    assert message in checks[name]


def test_missing_accounting_is_limited_and_missing_slurm_fatal(
    slurm: FakeSlurm,
    site: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm.set(accounting=False)
    code, checks = examine(site, tmp_path / "results", capsys)
    assert code == 0
    assert checks["accounting"].startswith("limited")
    monkeypatch.setenv("PATH", "/nowhere")
    code, checks = examine(site, tmp_path / "results", capsys)
    assert code == 1
    assert "no sbatch" in checks["SLURM"]


def test_node_without_an_answer_is_reported(
    slurm: FakeSlurm, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = examine(site, tmp_path / "results", capsys, "--nodes", "1")
    assert code == 1
    assert "this is no cluster" in checks["nodes"]


def test_node_answers_determine_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('system = "dgx2"\n[slurm]\ngpus_per_node = 16\n[environment]\ninterface = "ib0"\n')
    marker = tmp_path / ".probe-abc"
    marker.write_text("abc")
    node = probe.inspect_node(marker)
    assert node["folder"] == ""
    node |= {"host": "n1", "gpus": [{"name": "NVIDIA A100"}] * 8, "interfaces": {"lo": "127.0.0.1"}}
    checks = {check.name: check for check in probe.check_nodes(profile.load_profile(path), [node])}
    assert checks["interface"].fatal
    assert checks["GPUs there"].fatal
    assert checks["GPUs there"].found == "n1: 8 x NVIDIA A100"
    node["gpus"] = [{"name": "NVIDIA A100-SXM4-40GB", "compute_capability": "8.0"}] * 16
    other = {check.name: check for check in probe.check_nodes(profile.load_profile(path), [node])}
    assert other["GPUs there"].fatal
    assert other["GPUs there"].enables.startswith("dgx2 has NVIDIA V100 SXM3 32 GB, so no case would start")
    monkeypatch.setattr("sys.argv", ["probe", str(marker)])
    runpy.run_path(probe.__file__, run_name="__main__")
    assert json.loads(capsys.readouterr().out)["folder"] == ""
    marker.write_text("other")
    unshared = {
        check.name: check
        for check in probe.check_nodes(profile.load_profile(path), [probe.inspect_node(marker)])
    }
    assert unshared["shared folder"].fatal
