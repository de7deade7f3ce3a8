"""Tests of `repro logs` for a rank and for a job."""

from __future__ import annotations

import pytest

from repro import cli
from repro.launch.slurm import commands
from tests.launch.slurm.submitted import ThreeCases


def test_logs_show_the_end_of_long_files(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(submitted.results)]
    folder = submitted.folder / "logs" / "1" / submitted.experiments["b"].key
    folder.mkdir(parents=True)
    (folder / "rank-1.err").write_text("x" * 9000 + "the end\n")
    assert cli.main(["logs", "b", "--rank", "1", *results]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("the end")
    assert "last 8000 of 9008 bytes" in out
    assert cli.main(["logs", "b", *results]) == 0
    assert "ranks with logs: 1; --rank R prints the log of rank R" in capsys.readouterr().out
    assert cli.main(["logs", "d", *results]) == 2
    assert "case = 'd': must be a submitted case: a, b, c" in capsys.readouterr().err
    assert cli.main(["logs", "b", "--rank", "2", *results]) == 2


def test_long_lists_show_only_the_nearest_names() -> None:
    assert commands.list_names("x", ["a", "b", "a"]) == "a, b"
    names = [f"case-{i}" for i in range(500)]
    assert commands.list_names("case-77x", names).startswith("case-77, ")
    assert commands.list_names("case-77x", names).endswith(" (8 of 500)")


def test_logs_print_files_with_headings(submitted: ThreeCases, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(submitted.results)]

    def printed(*arguments: str) -> list[str]:
        assert cli.main(["logs", *arguments, *results]) == 0
        return capsys.readouterr().out.splitlines()

    assert printed("b") == ["no log: job 12_1 of b"]
    assert printed("b", "--rank", "0") == [
        "no log: rank 0 of b (a rank has logs while it runs, and after a failure)"
    ]
    (submitted.folder / "submitit").mkdir()
    for end, text in (("out", "fine\n\n"), ("err", "x" * 8000)):
        (submitted.folder / "submitit" / f"12_1_0_log.{end}").write_text(text)
    ranks = submitted.folder / "logs" / "1" / submitted.experiments["b"].key
    ranks.mkdir(parents=True)
    for rank in (10, 9, 0):
        (ranks / f"rank-{rank}.err").write_text(f"error {rank}")
    (ranks / "rank-0.out").write_text("out 0")
    job = submitted.folder / "submitit" / "12_1_0_log"
    assert printed("b") == [
        f"==> {job}.err",
        "x" * 8000,
        f"==> {job}.out",
        "fine",
        "ranks with logs: 0, 9, 10; --rank R prints the log of rank R",
    ]
    assert printed("b", "--rank", "0") == [
        f"==> {ranks}/rank-0.out",
        "out 0",
        f"==> {ranks}/rank-0.err",
        "error 0",
    ]
    (submitted.folder / "submitit" / "12_1_0_log.err").write_text("x" * 8001)
    assert printed("b")[:2] == [f"==> {job}.err (last 8000 of 8001 bytes)", "x" * 8000]
    for rank in ("2", "-1"):
        assert cli.main(["logs", "b", f"--rank={rank}", *results]) == 2
        assert "0 to 1" in capsys.readouterr().err
