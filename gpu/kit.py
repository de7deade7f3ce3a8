"""`make gpu-kit`: the source and the wheels that a target machine lacks, in one archive.

    python gpu/kit.py --python 3.12 --platform x86_64 --present torch,numpy --output build/gpu-kit.tar.gz

The archive unpacks to `gpu-kit/`: `gpu/run.sh`, `source/` and `packages/` (unpacked wheels). The target needs no pip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

try:
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name
except ImportError:
    sys.exit(f"error: {sys.executable} has no pip, which gets the wheels of a kit")

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from repro.measure.provenance import git_state  # noqa: E402

MAX_ARCHIVE_BYTES = 60 * 2**20
OLDEST_GLIBC_MINOR, NEWEST_GLIBC_MINOR = 17, 39
"""Minor versions of glibc 2 whose wheels are accepted."""
EXTRAS = ("slurm", "lab")
"""Extras of the project whose packages the kit contains."""
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark", "hypothesis")
"""Packages of the GPU tests."""
SOURCE = (
    "repro",
    "kernels",
    "suites",
    "slurm",
    "examples",
    "tests",
    "gpu",
    "pyproject.toml",
    "setup.py",
    "LICENSE",
)
"""Folders and files of the repository in the kit."""
INSTALLED_AS = {
    "repro/kernels": "kernels",
    "repro/examples": "examples",
    "repro/config/suites/files": "suites",
    "repro/config/suites/profiles": "slurm",
}
"""Links in the kit's source at which an installation has these folders."""
PIP_TIMEOUT_S = 300


def python_version(text: str) -> str:
    """Return `3.12` for `3.12`, `python3.12`, or the path of an interpreter."""
    if found := re.fullmatch(r"(?:python)?(3\.\d+)(?:\.\d+)?", text):
        return found[1]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([text, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"error: PYTHON = {text}: must be a version such as 3.12, or an interpreter")


def platform_tags(text: str) -> list[str]:
    """Return pip's platforms of a processor (`x86_64`, `aarch64`), newest first, or the platform itself."""
    if "_" in text.removeprefix("x86_64"):
        return [text]
    newer = [f"manylinux_2_{minor}_{text}" for minor in range(NEWEST_GLIBC_MINOR, OLDEST_GLIBC_MINOR - 1, -1)]
    return [*newer, f"manylinux2014_{text}", f"linux_{text}"]


def project_requirements() -> list[str]:
    """Return the requirements of the project, of its extras in the kit, and of the GPU tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = [
        r for r in extras["test"] if canonicalize_name(Requirement(r.partition(";")[0]).name) in TEST_PACKAGES
    ]
    return [*project["dependencies"], *(r for extra in EXTRAS for r in extras[extra]), *tests]


def missing_requirements(lines: list[str], present: set[str], python: str, machine: str) -> dict[str, str]:
    """Return requirement by canonical name for those that apply to the target and that it lacks."""
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    found = {}
    for line in lines:
        requirement = Requirement(line)
        name = str(canonicalize_name(requirement.name))
        if name in present or (requirement.marker is not None and not requirement.marker.evaluate(target)):
            continue
        extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
        found[name] = f"{requirement.name}{extras}{requirement.specifier}"
    return found


def install_wheels(folder: Path, present: set[str], python: str, platform: str) -> dict[str, str]:
    """Unpack the wheels that the target lacks into `folder`; return the version of each package."""
    tags = platform_tags(platform)
    machine = "aarch64" if "aarch64" in platform else "x86_64"
    wanted = missing_requirements(project_requirements(), present, python, machine)
    done: dict[str, str] = {}
    while wanted:
        _pip_install(folder, list(wanted.values()), python, tags)
        known = _installed(folder)
        new = {name: known[name] for name in known if name not in done}
        done |= {name: version for name, (version, _) in new.items()}
        further = [line for _, requirements in new.values() for line in requirements]
        lacking = missing_requirements(further, present | set(done), python, machine)
        if not new and lacking:
            sys.exit(f"error: {', '.join(lacking)}: no wheel for Python {python} on {platform}")
        wanted = lacking
    shutil.rmtree(folder / "bin", ignore_errors=True)
    return done


def _pip_install(folder: Path, requirements: list[str], python: str, tags: list[str]) -> None:
    platforms = [word for tag in tags for word in ("--platform", tag)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--upgrade"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run(
            [*command, *platforms, *requirements],
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            env=environment,
        )
        lines = done.stderr.strip().splitlines()
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        lines, failed = [f"no answer in {PIP_TIMEOUT_S} s"], True
    if failed:
        last = next(
            (line for line in reversed(lines) if line.startswith("ERROR")),
            lines[-1] if lines else "pip failed",
        )
        why = last.removeprefix("ERROR: ")
        sys.exit(f"error: no wheels of {', '.join(requirements)}: {why}; make gpu-kit needs a package index")


def _installed(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return version and requirements of every distribution in `folder`, by canonical name."""
    from importlib.metadata import distributions

    found = {}
    for one in distributions(path=[str(folder)]):
        found[str(canonicalize_name(one.metadata["Name"]))] = (one.version, one.requires or [])
    return found


def copy_source(folder: Path) -> None:
    """Copy the files that git knows, and link folders where an installation has them."""
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *SOURCE,
    ]
    try:
        names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"error: {ROOT} is not a git checkout, whose files make gpu-kit packs")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for link, target in INSTALLED_AS.items():
        (folder / link).symlink_to(os.path.relpath(folder / target, (folder / link).parent))


def main() -> None:
    """Make the archive."""
    parser = argparse.ArgumentParser(
        description="Pack the source and the wheels that a target machine lacks."
    )
    parser.add_argument("--python", default="3.12", help="version of the target's Python")
    parser.add_argument("--platform", default="x86_64", help="x86_64, aarch64 or a platform of pip")
    parser.add_argument("--present", default="torch,numpy", help="packages that the target has")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-kit.tar.gz")
    asked = parser.parse_args()
    present = {str(canonicalize_name(name)) for name in re.split(r"[\s,]+", asked.present) if name}
    present |= {"torch", "numpy"}
    python = python_version(asked.python)
    with tempfile.TemporaryDirectory() as temporary:
        kit = Path(temporary) / "gpu-kit"
        for name in ("source", "packages", "gpu"):
            (kit / name).mkdir(parents=True)
        versions = install_wheels(kit / "packages", present, python, asked.platform)
        copy_source(kit / "source")
        for name in ("run.sh", "start.py"):
            shutil.copy2(ROOT / "gpu" / name, kit / "gpu" / name)
        facts = {"python": python, "platform": asked.platform, "packages": versions}
        facts |= {"present": sorted(present), "git": git_state(ROOT)}
        (kit / "source" / "kit.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(asked.output, "w:gz", compresslevel=6) as archive:
            archive.add(kit, "gpu-kit", filter=_without_byte_code)
    size = asked.output.stat().st_size
    if size > MAX_ARCHIVE_BYTES:
        over = f"{size / 2**20:.0f} MiB, and must be below {MAX_ARCHIVE_BYTES // 2**20} MiB"
        sys.exit(f"error: {asked.output}: is {over}; name more packages that the target has in PRESENT")
    print(
        f"{asked.output}: {size / 2**20:.1f} MiB for Python {python} on {asked.platform}, with {len(versions)} packages"
    )
    print("there: tar -xzf gpu-kit.tar.gz && gpu-kit/gpu/run.sh --minutes 9 --out results-of-the-day")


def _without_byte_code(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


if __name__ == "__main__":
    main()
