"""Tests of the artifact appendix: it has every claim of the ledger, with the commands of the suites."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.claims.run_commands import ROOT, SuiteCatalogue, covering_globs, experiments_of
from repro.report import export as artifact


def test_committed_appendix_has_every_claim_once_with_its_command() -> None:
    text = artifact.appendix()
    assert (ROOT / "reports/artifact.md").read_text(encoding="utf-8") == text, "run `make artifact`"
    named = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(claim.id for claim in load_ledger().claims)
    assert "repro submit suites/zero_r.toml --profile slurm/dgx2.toml" in text
    assert "400 GPUs of dgx2" in text


def test_commands_of_a_claim_run_only_its_experiments() -> None:
    catalogue = SuiteCatalogue()
    for claim in load_ledger().claims:
        required = set(experiments_of(claim.rows))
        commanded = set()
        for command in catalogue.commands(required):
            patterns = re.findall(r"--only '([^']+)'", command.text) or ["*"]
            names = [entry.experiment.name for entry in catalogue.suites[command.suite].entries]
            chosen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
            assert chosen == set(command.names), (claim.id, command.text)
            commanded |= {(command.kind, f"{command.suite}/{name}") for name in chosen}
        assert required <= commanded, claim.id
        # A command for a simulated experiment may also measure it on its cluster.
        assert {name for _, name in commanded} == {name for _, name in required}, claim.id


@pytest.mark.parametrize(
    ("names", "every", "expected"),
    [
        ({"a-1", "a-2"}, ["a-1", "a-2", "b-1"], ["a-*"]),
        ({"a-1", "b-1"}, ["a-1", "a-2", "b-1"], ["a-1", "b-1"]),
        ({"a"}, ["a", "ab"], ["a"]),
        ({"a", "ab"}, ["a", "ab"], ["a*"]),
    ],
)
def test_covering_globs_are_short_and_exact(names: set[str], every: list[str], expected: list[str]) -> None:
    assert covering_globs(names, every) == expected


def test_appendix_is_written_to_the_output_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(artifact, "appendix", lambda own: "text\n")
    assert cli.main(["artifact", "--output", str(tmp_path / "artifact.md")]) == 0
    assert (tmp_path / "artifact.md").read_text(encoding="utf-8") == "text\n"
    assert cli.main(["artifact", "--output", str(tmp_path / "no" / "artifact.md")]) == 2
    assert "a file in an existing folder" in capsys.readouterr().err
