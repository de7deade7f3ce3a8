"""`repro init` writes a suite that runs as it is, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.config import ConfigError
from repro.config.models import load_model
from repro.config.suites import TEMPLATES, load_suite
from repro.config.systems import load_system_file
from tests.records import latest


@pytest.mark.slow
def test_it_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "first.toml"]) == 0
    assert "next: repro run first.toml --dry-run" in capsys.readouterr().out
    suite = load_suite(Path("first.toml"))
    assert suite.name == "first"
    assert cli.main(["run", "first.toml"]) == 0
    records = latest(tmp_path / "results")
    assert {record["name"] for record in records.values()} == {"plain", "zero2", "tensor"}
    assert {record["outcome"] for record in records.values()} == {"ok"}


def test_each_kind_of_file_is_read_by_the_reader_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
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
def test_a_port_of_another_bandwidth_takes_nothing_of_the_other_machine(key: str, tmp_path: Path) -> None:
    text = TEMPLATES["system"].read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith(f"{key} =")))
    with pytest.raises(ConfigError, match=f"inter-node.{key}: is missing.*dgx-h100") as caught:
        load_system_file(str(path))
    assert str(path) in str(caught.value)
    path.write_text(path.read_text().replace("value = 25e9", "value = 400e9"))  # that of a DGX H100
    assert load_system_file(str(path)).links["inter-node"].per == "node"


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ('\ntitle = "Claims', r'mine.toml: title: is missing: add title = "..." above'),
        ('\ntitle = "A report', r"mine.toml: source\[OWN\].title: is missing"),
        (
            ', metric = "exact-padding"',
            r"metric: is missing next to expect: must be memory, the class of the row, or exact",
        ),
    ],
)
def test_a_missing_title_or_class_is_named(left_out: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = TEMPLATES["claim"].read_text(encoding="utf-8")
    assert left_out in text
    path.write_text(
        text.replace(left_out, left_out.replace("title", "# title") if "title" in left_out else "")
    )
    with pytest.raises(ConfigError, match=message):
        load_ledger(own=[path])


def test_the_class_beside_expect_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEMPLATES["claim"].read_text(encoding="utf-8").replace("exact-padding", "memory"))
    claim = load_ledger(own=[path]).claim("own-states")
    assert [one.metric for row in claim.rows for one in row.evidence] == ["memory"] * 3


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("there.toml", "already exists"),
        ("a.txt", "must be a file that ends in .toml"),
        ("no/a.toml", "folder"),
    ],
)
def test_what_it_does_not_write(
    name: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("mine")
    assert cli.main(["init", name]) == 2
    assert printed in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert Path("there.toml").read_text() == "mine"
