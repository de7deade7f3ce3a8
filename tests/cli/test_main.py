"""The command line: help with examples, a quick start without torch, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from repro import __version__, cli
from repro.config import ConfigError

COMMANDS = (
    *("run", "init", "claims", "models", "systems", "report", "validate", "schedule", "doctor", "calibrate"),
    *("simulate", "fit", "plan", "submit", "status", "logs", "cancel", "collect", "export", "compare", "lab"),
    *("evaluate", "export-weights"),
)
SCHEDULE = ["schedule", "--pp", "4", "--micro-batches", "8"]
HEAVY = ("torch", "pandas", "scipy", "numpy", "matplotlib", "seaborn")


def process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"Example:  repro {command}" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


LIGHT = [["--help"], *([name, "--help"] for name in COMMANDS), ["models"], ["systems"], ["claims"], SCHEDULE]


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "repro", "--version"], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (__version__, 0), done.stderr
    done = subprocess.run([sys.executable, "-m", "repro", "models", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_nothing_heavy_is_imported() -> None:
    """One after the other in one process: the first that imports too much is the one that is said."""
    code = (
        "import json, sys\n"
        "import repro.cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    repro.cli.main(arguments)\n"
        f"    print('imported', arguments, *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    message = process(code, json.dumps(LIGHT)).stderr.splitlines()
    found = [line for line in message if line.startswith("imported")]
    assert found == [f"imported {arguments}" for arguments in LIGHT]


def test_planning_a_run_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import repro.launch.run, repro.results.tables, repro.claims, repro.config, repro.config.suites\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = process(code)
    assert done.stdout.strip() == "[]", done.stderr


def raising(error: BaseException) -> Callable[..., int]:
    def command(*arguments: Any, **options: Any) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ConfigError("layout.tp", 3, "a divisor of heads = 4", file="s.toml"),
            2,
            "s.toml: layout.tp = 3: must be a divisor",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            PermissionError(13, "Permission denied", "results/records"),
            1,
            "results/records: Permission denied",
        ),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    says: str,
) -> None:
    from repro.report.text import results

    monkeypatch.setattr(results, "print_run", raising(error))
    assert cli.main(["run", "s.toml"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == bool(says)


def test_what_a_command_returns_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.report.text import results

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(results, "print_run", lambda *given, **how: seen.append((*given, how)) or 1)
    assert cli.main(["run", "s.toml", "t.toml", "--only", "a*", "--only", "b", "--rerun", "--json"]) == 1
    suites = [Path("s.toml"), Path("t.toml")]
    how = {"evidence": "measured", "system": "", "profile": False}
    assert seen == [(suites, ["a*", "b"], Path("results"), True, True, False, how)]


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "s.toml", "--jsn"], ["models", "a", "b"]])
def test_wrong_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["claims", "--help"], SCHEDULE])
def test_benchmark_of_the_start(benchmark: Any, arguments: list[str]) -> None:
    code = f"import sys; from repro.cli import main; sys.exit(main({arguments!r}))"
    benchmark.pedantic(lambda: process(code), rounds=5)
