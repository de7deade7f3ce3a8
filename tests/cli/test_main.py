"""Tests of the command line: help with examples, a start without large packages, and exit codes."""

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
LARGE = ("torch", "pandas", "scipy", "numpy", "matplotlib", "seaborn")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"Example:  repro {command}" in capsys.readouterr().out


def test_help_lists_the_commands_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


LIGHT = [["--help"], *([name, "--help"] for name in COMMANDS), ["models"], ["systems"], ["claims"], SCHEDULE]


def test_python_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "repro", "--version"], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (__version__, 0), done.stderr
    done = subprocess.run([sys.executable, "-m", "repro", "models", "nope"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_light_commands_import_no_large_package() -> None:
    """One process runs all commands in order, so the first command that imports a large package fails."""
    code = (
        "import json, sys\n"
        "import repro.cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    repro.cli.main(arguments)\n"
        f"    print('imported', arguments, *(name for name in {LARGE!r} if name in sys.modules), file=sys.stderr)"
    )
    message = python(code, json.dumps(LIGHT)).stderr.splitlines()
    found = [line for line in message if line.startswith("imported")]
    assert found == [f"imported {arguments}" for arguments in LIGHT]


def test_planning_a_run_imports_no_large_package() -> None:
    code = (
        "import sys\n"
        "import repro.launch.run, repro.results.tables, repro.claims, repro.config, repro.config.suites\n"
        f"print([name for name in {LARGE!r} if name in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


def raising(error: BaseException) -> Callable[..., int]:
    def command(*arguments: Any, **options: Any) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
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
def test_exit_code_of_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    from repro.report.text import results

    monkeypatch.setattr(results, "print_run", raising(error))
    assert cli.main(["run", "s.toml"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == bool(message)


def test_exit_code_is_the_return_value_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.report.text import results

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(results, "print_run", lambda *args, **keys: calls.append((*args, keys)) or 1)
    assert cli.main(["run", "s.toml", "t.toml", "--only", "a*", "--only", "b", "--rerun", "--json"]) == 1
    suites = [Path("s.toml"), Path("t.toml")]
    keys = {"evidence": "measured", "system": "", "profile": False}
    assert calls == [(suites, ["a*", "b"], Path("results"), True, True, False, keys)]


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "s.toml", "--jsn"], ["models", "a", "b"]])
def test_error_of_wrong_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["claims", "--help"], SCHEDULE])
def test_benchmark_of_the_start_time(benchmark: Any, arguments: list[str]) -> None:
    code = f"import sys; from repro.cli import main; sys.exit(main({arguments!r}))"
    benchmark.pedantic(lambda: python(code), rounds=5)
