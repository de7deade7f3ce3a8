"""Tests of the Makefile that need no installation: errors, stamps, installations and the commands of targets."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from repro.claims.judge import experiments_read
from tests import committed, supported_pythons

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

TARGETS = """
smoke simulate test test-slow engines test-engines test-slurm test-gpu bench-gpu gpu-kit
test-gpu-kit check docs mutants benchmarks slurm-lab slurm-packages browser-packages artifact
notebooks clean
"""
VARIABLES = "MAKEFLAGS MFLAGS MAKELEVEL PYTHON VENV CONSTRAINTS KEEP_TORCH TORCH_INDEX CPU_INDEX UV RESULTS"
"""Variables of the environment that change the commands of make."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the Makefile and the files on which its stamps depend to a folder without an environment."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES.split()}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_environment(folder: Path, run_status: int = 0) -> Path:
    """Create an environment whose python and repro log their arguments and do nothing; return the log."""
    log = folder / "log"
    log.touch()
    script(folder / ".venv/bin/python", f'echo "python $*" >> {log}')
    script(folder / ".venv/bin/repro", f'echo "repro $*" >> {log}; [ "$1" != run ] || exit {run_status}')
    return log


def logged(log: Path, part: str) -> list[str]:
    """Return the commands in a log that contain this text."""
    return [line for line in log.read_text().splitlines() if part in line]


def newer_requirements(folder: Path) -> None:
    """Make pyproject.toml newer than the installation of the test extra."""
    later = (folder / ".venv/.installed-test").stat().st_mtime + 10
    os.utime(folder / "pyproject.toml", (later, later))


def test_help_names_every_target(copy: Path) -> None:
    done = make(copy)
    assert done.returncode == 0
    assert [target for target in TARGETS.split() if f"make {target}" not in done.stdout] == []


def test_pip_runs_once_per_change_of_the_requirements(copy: Path) -> None:
    log = fake_environment(copy)
    for _ in range(2):
        assert make(copy, "-j4", "test", "test-slow").returncode == 0
    installs = logged(log, "pip install")
    assert len(installs) == 3  # the harness, the test extra, a second NVRTC
    assert all("-c constraints-cpu.txt" in line for line in installs)
    newer_requirements(copy)
    make(copy, "test-slow")
    assert len(logged(log, "pip install")) == 5  # the second NVRTC is not installed again


def test_constraints_and_torch_index_can_be_set(copy: Path) -> None:
    """Only torch comes from TORCH_INDEX; its dependencies come from the default index."""
    log = fake_environment(copy)
    assert make(copy, "test", "CONSTRAINTS=", "TORCH_INDEX=https://example.org/cpu").returncode == 0
    torch, harness, *_ = logged(log, "pip install")
    assert torch.endswith("--no-deps --index-url https://example.org/cpu torch")
    assert "index-url" not in harness
    assert " -c " not in torch + harness


@pytest.fixture
def cpu_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a package index that has a page for torch, and return its address."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="other platforms get torch without CUDA from the default index, so make prints no note",
)
@pytest.mark.parametrize(
    ("machine", "note"),
    [
        ("without driver", "torch for CPUs: 0.2 GB downloaded from {index}"),
        ("index without torch", "note: {index} has no torch for this Python; the default index has it"),
        ("without index", "note: {index} does not answer; the default index has torch for Linux with CUDA:"),
        ("with driver", ""),
    ],
)
def test_without_a_driver_torch_comes_from_the_cpu_index(
    copy: Path, cpu_index: str, machine: str, note: str
) -> None:
    """The environment's python sends real requests to indexes, and logs the installations."""
    log = fake_environment(copy)
    script(
        copy / ".venv/bin/python",
        f"""case "$*" in
  *libcuda*) exit {int(machine != "with driver")};;
  *urllib*) exec {sys.executable} "$@";;
esac
echo "python $*" >> {log}
case "$*" in *--index-url*) exit {int(machine == "index without torch")};; esac""",
    )
    index = "http://127.0.0.1:9" if machine == "without index" else cpu_index
    done = make(copy, ".venv/.installed", f"CPU_INDEX={index}", "UV=")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if "CPU" in line or "CUDA" in line]
    assert len(notes) == bool(note)
    assert all(line.startswith(note.format(index=index)) for line in notes)
    torch_installs = logged(log, "--index-url")
    assert len(torch_installs) == (machine in ("without driver", "index without torch"))
    assert all(f"--no-deps --index-url {index} torch" in line for line in torch_installs)
    assert "-e .[lab,report,slurm,text]" in log.read_text().splitlines()[-1]


def test_docs_target_installs_its_packages_and_refuses_external_files(copy: Path) -> None:
    log = fake_environment(copy)
    assert make(copy, "smoke", "test").returncode == 0
    assert "docs" not in log.read_text()
    assert make(copy, "docs").returncode == 0
    install, build = log.read_text().splitlines()[-2:]
    assert install.endswith("-e .[docs]")
    assert build.endswith("-m mkdocs build --quiet --strict")
    page = copy / "build/docs/index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<a href="https://example.org"></a><script src="theme/local.js"></script>')
    assert make(copy, "docs").returncode == 0
    page.write_text('<script async src="https://example.org/search.js"></script>')
    done = make(copy, "docs")
    assert (done.returncode, "load files of other hosts" in done.stderr) == (2, True)
    assert log.read_text().count("[docs]") == 1


def test_uv_installs_packages_if_available(copy: Path, tmp_path: Path) -> None:
    log = fake_environment(copy)
    uv = script(tmp_path / "tools/uv", f'echo "uv $*" >> {log}')
    assert make(copy, "test", f"UV={uv}").returncode == 0
    installs = logged(log, "pip install")
    assert len(installs) == 2
    assert all(line.startswith("uv pip install --python .venv/bin/python") for line in installs)


def fake_python(folder: Path, torch: str, prefix: str = "") -> Path:
    """Write a python that has this version of torch, or no torch; in a virtual environment if `prefix` is not empty.

    An environment that this python creates has its torch only with --system-site-packages. All calls go to `log`.
    """
    answer = f"echo {torch}" if torch else "exit 1"
    inside = f"""case "$*" in
  *sys.prefix*) {f"exit {len(prefix)}"};;
  *metadata*) {answer};;
  *"-m venv"*) for last; do :; done; mkdir -p $last/bin; echo "venv $*" >> {folder}/log
    case "$*" in *--system-site-packages*) cp $0 $last/bin/python;; *) cp {folder}/bare $last/bin/python;; esac;;
  *) echo "python $*" >> {folder}/log;;
esac"""
    script(folder / "bare", f'case "$*" in *metadata*) exit 1;; *) echo "python $*" >> {folder}/log;; esac')
    return script(folder / "machines", inside)


def test_keep_torch_pins_the_torch_of_the_machine(copy: Path) -> None:
    """Later commands without KEEP_TORCH also pin the torch, and another torch of the machine changes the pin."""
    python = fake_python(copy, "2.7.1+cu126")
    done = make(copy, "test", "KEEP_TORCH=1", f"PYTHON={python}")
    assert done.returncode == 0, done.stderr
    assert "keeping torch 2.7.1+cu126" in done.stdout
    assert "--system-site-packages" in (copy / "log").read_text()
    assert (copy / ".venv/kept-torch.txt").read_text() == "torch==2.7.1+cu126\n"
    fake_python(copy, "2.8.0+cu126").replace(copy / ".venv/bin/python")
    newer_requirements(copy)
    assert make(copy, "test", f"PYTHON={python}").returncode == 0
    assert (copy / ".venv/kept-torch.txt").read_text() == "torch==2.8.0+cu126\n"
    installs = logged(copy / "log", "pip install")
    assert len(installs) == 4
    assert all(line.count(" -c ") == 1 and "-c .venv/kept-torch.txt" in line for line in installs)


def test_unsuitable_pythons_are_refused(copy: Path) -> None:
    old = script(copy / "python3.8", '[ "$1" = --version ] && { echo Python 3.8.1; exit; }\nexit 1')
    without_venv = script(copy / "without-venv", 'case "$2" in *ensurepip*) exit 1;; esac')

    def check_error(error: str, *arguments: str) -> None:
        done = make(copy, "test", *arguments)
        assert (done.returncode, error in done.stderr) == (2, True), done.stderr

    check_error("no no-such-python; install Python 3.10 or newer", "PYTHON=no-such-python")
    check_error("Python 3.8.1 is too old", f"PYTHON={old}")
    check_error("apt-get install python3-venv", f"PYTHON={without_venv}")
    check_error("has no torch; name a Python that has it", "KEEP_TORCH=1", f"PYTHON={fake_python(copy, '')}")
    inside = fake_python(copy, "2.7.1", "/env")
    check_error("is in a virtual environment; install into it", "KEEP_TORCH=1", f"PYTHON={inside}")
    assert not (copy / ".venv").exists(), "no environment is created"
    python = fake_python(copy, "2.7.1")
    assert make(copy, "test", f"PYTHON={python}").returncode == 0
    pinned = "error: .venv has the pinned torch; create another environment: make KEEP_TORCH=1 VENV=DIR"
    check_error(pinned, "KEEP_TORCH=1", f"PYTHON={python}")
    assert make(copy, "test", "KEEP_TORCH=1", "VENV=other", f"PYTHON={python}").returncode == 0


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
@pytest.mark.parametrize(
    ("missing", "expected_calls"),
    [("libcuda", ["libcuda"]), ("doctor.machine", ["libcuda", "libcuda", "pip", "pip", "doctor.machine"])],
)
def test_gpu_targets_check_driver_and_device_before_other_commands(
    copy: Path, target: str, missing: str, expected_calls: list[str]
) -> None:
    log = fake_environment(copy)
    script(copy / ".venv/bin/python", f'echo "python $*" >> {log}; case "$*" in *{missing}*) exit 1;; esac')
    done = make(copy, target)
    assert done.returncode != 0
    assert ("error: no NVIDIA driver on this machine" in done.stderr) is (missing == "libcuda")
    calls = log.read_text().splitlines()
    assert [word in call for word, call in zip(expected_calls, calls, strict=True)] == [True] * len(calls)


@pytest.mark.parametrize(
    ("arguments", "commands", "system"),
    [
        (["smoke"], "run claims run run run validate report claims", "dgx-h100"),
        (["simulate", "TODAY=dgx-h200"], "run run claims", "dgx-h200"),
    ],
)
def test_smoke_and_simulate_run_their_commands_in_order(
    copy: Path, arguments: list[str], commands: str, system: str
) -> None:
    """Both targets simulate the suites of all claims, and then repeat the claims on the system of today."""
    log = fake_environment(copy)
    assert make(copy, *arguments).returncode == 0
    calls = logged(log, "repro ")
    assert [call.split()[1] for call in calls] == commands.split()
    assert (arguments == ["smoke"]) == ("--claim headlines --evidence simulated" in calls[0])
    again = f"repro run suites/again.toml --evidence simulated --system {system} --results results"
    simulation = calls[calls.index(again) - 1]
    assert "--evidence simulated" in simulation
    suites = [Path(word).stem for word in simulation.split() if word.endswith(".toml")]
    read = {
        name.partition("/")[0]
        for claim in committed.ledger().claims
        for row in claim.rows
        for evidence in row.evidence
        if evidence.kind == "simulated"
        for name in experiments_read(evidence.value, row.variables)
    }
    assert read <= set(suites)
    assert len(suites) == len(set(suites))


@pytest.mark.parametrize(("status", "commands"), [(1, 8), (2, 1), (130, 1)])
def test_smoke_stops_only_on_bad_input_and_ctrl_c(copy: Path, status: int, commands: int) -> None:
    log = fake_environment(copy, run_status=status)
    done = make(copy, "smoke")
    assert f"Error {status}" in done.stderr
    assert log.read_text().count("repro ") == commands


def continuous_integration(path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / ".ci/run")], env={"PATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("user", "apt", "namespaces", "note"),
    [
        (0, True, 0, ""),
        (0, False, 0, "not run, because there is no apt-get"),
        (1000, True, 0, "not run, because installing SLURM"),
        (0, True, 1, "not run, because this machine forbids"),
    ],
)
def test_continuous_integration_runs_all_available_targets(
    tmp_path: Path, user: int, apt: bool, namespaces: int, note: str
) -> None:
    log = tmp_path / "log"
    programs = {"make": f'echo "$*" >> {log}', "id": f"echo {user}", "unshare": f"exit {namespaces}"}
    programs |= {"apt-get": "exit 1"} if apt else {}
    for name, text in programs.items():
        script(tmp_path / name, text)
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = continuous_integration(str(tmp_path))
    assert done.returncode == 0, done.stderr
    slurm, slurm_tests = ([], "") if note else (["slurm-packages"], " test-slurm")
    browser = ["browser-packages"] if apt and user == 0 else []
    kit = [] if namespaces else ["test-gpu-kit"]
    of_store = "test PYTEST_ARGS=tests/report/test_page.py tests/test_numbers.py -k 'every_page or store'"
    expected = ["check", "docs", *browser, "test", *slurm]
    expected += [f"-j3 --output-sync test-slow test-pythons{slurm_tests}", *kit, "engines", "test-engines"]
    assert log.read_text().splitlines() == [*expected, "smoke", of_store]
    assert note in done.stdout


def test_continuous_integration_stops_at_the_first_failure(tmp_path: Path) -> None:
    script(tmp_path / "make", "echo broken >&2; exit 3")
    done = continuous_integration(f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (3, "broken\n")
    assert ".ci/run" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")


def test_continuous_integration_tests_all_supported_pythons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions come from pyproject.toml; the output names versions that did not run."""
    versions = supported_pythons.supported_versions()
    matrix = ", ".join(f'"{version}"' for version in versions)
    assert f"python: [{matrix}]" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    monkeypatch.setattr(supported_pythons, "find_uv", lambda: "uv")
    monkeypatch.setattr(supported_pythons, "find_interpreter", lambda version: version.removeprefix("3.10"))
    failing = {versions[-1]: "failed: pytest"}
    monkeypatch.setattr(
        supported_pythons, "check_version", lambda uv, version, _: failing.get(version, "ok in 9 s")
    )
    current = "{}.{}".format(*sys.version_info)
    assert supported_pythons.main() == (current != versions[-1])
    outcomes = dict.fromkeys(versions, "ok in 9 s") | failing
    outcomes |= {"3.10": "not run: this machine has no python3.10"}
    outcomes |= {current: "not run here: make test runs all tests with this version"}
    expected = [f"Python {version}: {outcomes[version]}" for version in versions]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_python_that_does_not_start_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv puts a shim of every installed version on PATH, and only the shim of the selected version starts."""
    monkeypatch.setenv("PATH", str(script(tmp_path / "bin/python3.10", "exit 127").parent))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert supported_pythons.find_interpreter("3.10") == ""
    python = script(tmp_path / "pyenv/versions/3.10.13/bin/python3.10", "echo 3.10")
    assert supported_pythons.find_interpreter("3.10") == str(python)


@pytest.mark.slow
def test_an_environment_in_a_non_ascii_folder_works_without_utf8(copy: Path, tmp_path: Path) -> None:
    """The environment's python starts in the locale C without UTF-8 mode."""
    folder = tmp_path / "übung"
    shutil.copytree(copy, folder, ignore=shutil.ignore_patterns("übung"))
    created = make(folder, ".venv/bin/python", f"PYTHON={sys.executable}")
    assert created.returncode == 0, created.stderr
    (library,) = folder.glob(".venv/lib/python*/site-packages")
    (folder / "source").mkdir()
    (folder / "source/found.py").write_text("import sys; print(sys.argv[1:], sys.flags.utf8_mode)")
    # An editable installation has its folder in the source of a module that a .pth file imports.
    (library / "finder.py").write_text(f"import sys; sys.path.append('{folder}/source')", encoding="utf-8")
    (library / "finder.pth").write_text("import finder")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [folder / ".venv/bin/python", "-m", "found", "a b"]
    done = subprocess.run(command, env=ascii_only, cwd="/", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['a b'] 1\n", "")
