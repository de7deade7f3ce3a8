"""Tests of `repro init`: its templates are valid files, and existing files are not overwritten."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.config import ConfigError
from repro.config.models import load_model
from repro.config.suites import TEMPLATES, load_suite
from repro.config.systems import load_system_file
from tests.records import latest


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_suite_template_runs_without_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "first.toml"]) == 0
    assert "next: repro run first.toml --dry-run" in capsys.readouterr().out
    assert load_suite(Path("first.toml")).name == "first"
    assert cli.main(["run", "first.toml"]) == 0
    records = latest(Path("results"))
    assert {record["name"] for record in records.values()} == {"plain", "zero2", "tensor"}
    assert {record["outcome"] for record in records.values()} == {"ok"}


def test_every_template_is_read_by_its_reader(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in TEMPLATES:
        assert cli.main(["init", kind, f"{kind}.toml"]) == 0
        assert f"{kind}.toml: a commented {kind}\nnext: repro " in capsys.readouterr().out
    claim = load_ledger(own=[Path("claim.toml")]).claim("own-states")
    assert [one.kind for row in claim.rows for one in row.evidence] == ["analytic", "simulated", "measured"]
    assert load_model("model.toml").kv_heads == 4
    port = load_system_file("system.toml").links["inter-node"]
    assert (port.per, port.adapters.value, port.rings.value) == ("node", 1, 1)
    assert cli.main(["init", "claims", "more.toml"]) == 2
    assert "KIND = 'claims': must be one of suite, claim, system, model" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["per", "adapters", "rings"])
def test_link_of_another_bandwidth_must_define_all_its_keys(key: str, tmp_path: Path) -> None:
    text = TEMPLATES["system"].read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith(f"{key} =")))
    with pytest.raises(ConfigError, match=f"inter-node.{key}: is missing.*dgx-h100") as caught:
        load_system_file(str(path))
    assert str(path) in str(caught.value)
    path.write_text(path.read_text().replace("value = 25e9", "value = 400e9"))  # the bandwidth of a DGX H100
    assert load_system_file(str(path)).links["inter-node"].per == "node"


METRIC = ', metric = "exact-padding"'


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (r'\ntitle = "Claims.*', r'mine.toml: title: is missing: add title = "..." above'),
        (r'\ntitle = "A report.*', r"mine.toml: source\[OWN\].title: is missing"),
        (METRIC, "metric: is missing, but expect is given: must be memory, the row's toler"),
    ],
)
def test_error_names_a_missing_title_or_metric_class(left_out: str, message: str, tmp_path: Path) -> None:
    path, template = tmp_path / "mine.toml", TEMPLATES["claim"].read_text(encoding="utf-8")
    text, count = re.subn(left_out, "", template)
    assert count
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_ledger(own=[path])
    path.write_text(template.replace("exact-padding", "memory"))
    claim = load_ledger(own=[path]).claim("own-states")
    assert [one.metric for row in claim.rows for one in row.evidence] == ["memory"] * 3


def test_init_quotes_special_names_and_rejects_existing_files_and_other_paths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ('a"b.toml', "a b.toml", "ü.toml")
    for name in names:
        assert cli.main(["init", name]) == 0
        command = capsys.readouterr().out.splitlines()[-1].partition("then ")[2]
        assert shlex.split(command) == ["repro", "run", name]
        assert cli.main([*shlex.split(command)[1:], "--dry-run"]) == 0
        capsys.readouterr()
    Path("there.toml").write_text("mine")
    for name, printed in (
        ("there.toml", "already exists"),
        ("a.txt", "must be a file that ends in .toml"),
        ("no/a.toml", "folder"),
    ):
        assert cli.main(["init", name]) == 2
        assert printed in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {*names, "there.toml"}
    assert Path("there.toml").read_text() == "mine"
