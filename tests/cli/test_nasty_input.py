"""Tests of invalid arguments and files in every command: exit code 2 and one line with the accepted values."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from repro import cli
from repro.results.store import Store
from tests.claims.test_user_ledger import USER_LEDGER
from tests.records import made_up

SUITE = '[suite]\nname = "s"\n'
EXPERIMENT = '[[experiment]]\nname = "a"\nmodel = "gpt2-tiny"\n'
MODEL = "layers = 2\nhidden = 64\nheads = 4\nvocab = 128\nseq = 64\n"
SYSTEM = (Path(__file__).parents[2] / "repro/config/systems/lowbw-v100.toml").read_text(encoding="utf-8")
PROFILE = (Path(__file__).parents[2] / "slurm/dgx2.toml").read_text(encoding="utf-8")
RUN = "run s.toml --dry-run"


class Case(NamedTuple):
    message: str
    """Part of the error."""
    command: str = RUN
    experiment: str = ""
    """Additional keys of the only experiment of `s.toml`."""
    file: str = ""
    """Text of the file that the command reads, instead of the valid `s.toml`."""


def system(old: str, new: str) -> str:
    assert old in SYSTEM
    return SYSTEM.replace(old, new, 1)


CASES = {
    # suites
    "an empty data file": Case(
        "training.data = 'empty.txt': must be data of at least seq + 1 = 129 tokens; the file has 0",
        experiment='training.data = "empty.txt"',
    ),
    "a model that is a number": Case("models.x = 3: must be a table", experiment="[models]\nx = 3"),
    "a file name with a null byte": Case(
        "must be the path of a TOML file", file=SUITE + EXPERIMENT.replace("gpt2-tiny", "a\\u0000.toml")
    ),
    "lists nested too deeply": Case(
        "s.toml: not TOML: tables or lists are nested too deeply", file=f"x = {'[' * 5000}{']' * 5000}"
    ),
    "a blank name": Case("name = ' ': must be a name", file=SUITE + EXPERIMENT.replace('"a"', '" "')),
    "a name like an option": Case(
        "name = '--all': must be a name", file=SUITE + EXPERIMENT.replace('"a"', '"--all"')
    ),
    "a suite twice": Case(
        "s.toml: suite.name = 's': must be a name that no other", "run s.toml s.toml --dry-run"
    ),
    "a suite without its file extension": Case("suite = 's': did you mean s.toml?", "run s --dry-run"),
    "a system for a measured run": Case(
        "--system = 'dgx2': needs --evidence simulated", f"{RUN} --system dgx2"
    ),
    "a file instead of a folder": Case(
        "--results = 's.toml': must be a folder, but is a file", f"{RUN} --results s.toml"
    ),
    "a name of 5,000 letters": Case("aaa...aaa", f"run {'a' * 5000}.toml"),
    # empty arguments
    "an empty suite": Case("argument = '': is empty", "run ''"),
    "empty file": Case("--timeline = '': is empty", "simulate --model m --system s --gpus 8 --timeline ''"),
    "an empty limit": Case(
        "--memory-limit = '': is empty", "plan --model m --system s --gpus 8 --memory-limit="
    ),
    # models and systems
    "an infinite model": Case(
        "m.toml: m.published_params = inf: must be finite",
        "models m.toml",
        file=f"{MODEL}published_params = inf",
    ),
    "a model without a name": Case(
        "m.toml: name = '': must be a name", "models m.toml", file=f'name = ""\n{MODEL}'
    ),
    "a model with a path as its name": Case(
        "name = '../x': must be a name", "models m.toml", file=f'name = "../x"\n{MODEL}'
    ),
    "infinitely many devices": Case(
        "s.toml: devices_per_node.value = inf: must be finite",
        "systems s.toml",
        file=system("devices_per_node = { value = 4", "devices_per_node = { value = inf"),
    ),
    "a boolean number of devices": Case(
        "s.toml: devices_per_node.value = true: must be a number",
        "systems s.toml",
        file=system("devices_per_node = { value = 4", "devices_per_node = { value = true"),
    ),
    # output files, which are checked before the command runs
    "a timeline in a missing folder": Case(
        "--timeline = '/nowhere/x.json': must be a file in an existing folder",
        "simulate --model gpt2-1.5b --system dgx2 --gpus 8 --timeline /nowhere/x.json",
    ),
    "a snapshot in a missing folder": Case(
        "--snapshot = '/nowhere/x.pickle': must be a file in an existing folder",
        "simulate --model gpt2-1.5b --system dgx2 --gpus 8 --snapshot /nowhere/x.pickle",
    ),
    "a profile of a simulation": Case(
        "--profile = 'simulated': needs measured runs", "run smoke --profile --evidence simulated"
    ),
    "a timeline that is a folder": Case(
        "--timeline = '.': must be a file that can be written (Is a directory)",
        "simulate --model gpt2-1.5b --system dgx2 --gpus 8 --timeline .",
    ),
    "a suite in a read-only folder": Case(
        "FILE = '/proc/x.toml': must be a file that can be written", "init /proc/x.toml"
    ),
    "a page in a file": Case("--out = 's.toml': must be a writable folder", "report --out s.toml"),
    # ledgers
    "a ledger with the name of a packaged ledger": Case(
        "--ledger = 'yuan.toml': must be a file whose name no other ledger file has",
        "claims --ledger yuan.toml",
        file='title = "Mine"\n',
    ),
    # clusters
    "an unknown profile": Case(
        "--profile = 'dgx3': unknown profile; did you mean dgx2?", "submit smoke --profile dgx3 --dry-run"
    ),
    "a negative price": Case(
        "p.toml: price_per_gpu_hour = -1.0: must be 0 (unknown) or more",
        "submit zero_r --profile p.toml --dry-run",
        file=f"price_per_gpu_hour = -1.0\n{PROFILE}",
    ),
    "a partition of two lines": Case(
        "p.toml: slurm.partition = 'a\\n#SBATCH --x': must be text of one line",
        "submit zero_r --profile p.toml --dry-run",
        file='[slurm]\npartition = "a\\n#SBATCH --x"\n',
    ),
    "an option of two words": Case(
        "p.toml: slurm.options = 'a b': must be names of options of sbatch",
        "doctor --profile p.toml",
        file='[slurm]\noptions = { "a b" = "x" }\n',
    ),
    "nodes of two lines": Case(
        "exclude = 'n1\\nx': must be text of one line",
        "submit zero_r --profile dgx2 --dry-run --exclude 'n1\nx'",
    ),
    "nodes without cluster": Case("--nodes = 3: must be 0 or more, and needs --profile", "doctor --nodes 3"),
    "jobs of a missing folder": Case(
        "--results = 'nowhere': must be a folder that `repro submit`", "cancel --results nowhere"
    ),
    "records in a file instead of a folder": Case(
        "--into = 's.toml': must be a folder, but is a file", "collect --into s.toml"
    ),
    # twins
    "a rate of nan": Case("--within = 'nan': must be bytes/s", "twin ds-3p75x-lowbw --within nan"),
    "a twin of an unknown claim": Case("CLAIM = 'nope': must be the id of a claim", "twin nope"),
    "a twin without steps": Case("--steps = 0: must be 2 or more", "twin ds-3p75x-lowbw --steps 0"),
    "a rank without --measure": Case(
        "--as-rank = 3: is allowed only with --measure", "fit --system dgx2 --gpus 8 --as-rank 3"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_of_a_mistake_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = CASES[case]
    words = shlex.split(given.command)
    name = next((word for word in words if word in ("m.toml", "p.toml", "yuan.toml")), "s.toml")
    (tmp_path / name).write_text(given.file or f"{SUITE}{EXPERIMENT}{given.experiment}")
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert given.message in err
    assert len(err.splitlines()) == 1
    assert len(err) < 600


def test_init_quotes_names_with_special_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ('a"b.toml', "a b.toml", "ü.toml"):
        assert cli.main(["init", name]) == 0
        command = capsys.readouterr().out.splitlines()[-1].partition("then ")[2]
        assert shlex.split(command) == ["repro", "run", name]
        assert cli.main([*shlex.split(command)[1:], "--dry-run"]) == 0


@pytest.mark.parametrize(
    "keys",
    [
        {"metrics": {"step_seconds.median": "fast"}},
        {"metrics": {"step_seconds.median": None}},
        {"metrics": {"step_seconds.median": float("nan")}},
        {"evidence": "guessed"},
        {"wall_s": "long"},
    ],
    ids=str,
)
def test_store_skips_and_reports_an_invalid_record(keys: dict[str, object], tmp_path: Path) -> None:
    line = {**made_up("a").as_dict(), **keys}
    (tmp_path / "records").mkdir()
    (tmp_path / "records/a.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(made_up('b').as_dict())}\n")
    store = Store(tmp_path)
    assert [record.name for record in store.records()] == ["b"]
    assert len(store.skipped) == 1
    assert "a.jsonl:1: " in store.skipped[0]


@pytest.mark.parametrize("expression", ["sqrt(-2)", "'a' * 10**9", "10**9 * 'a'"])
def test_expression_that_cannot_be_evaluated_is_rejected(
    expression: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(USER_LEDGER.replace("model_state_bytes(1e9, 8, 3)", expression))
    assert cli.main(["claims", "mine-states", "--json", "--ledger", str(path)]) == 2
    assert "no number of the row changes the value of this expression" in capsys.readouterr().err


def test_error_of_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["artifact", "--output", "/dev/full"]) == 1
    assert capsys.readouterr().err == "error: /dev/full: No space left on device\n"
