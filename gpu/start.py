"""Copy the kit to a temporary folder and start `repro gpu-day` there. `gpu/run.sh` starts this file."""

import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Replace this process by `repro gpu-day` on the copy, which deletes the copy at its end."""
    facts = json.loads((KIT / "source" / "kit.json").read_text(encoding="utf-8"))
    made_for = facts["python"]
    here = ".".join(map(str, sys.version_info[:2]))
    if here != made_for:
        sys.exit(
            f"error: {sys.executable} is Python {here}, and the kit is for {made_for}; PYTHON=/path names another one"
        )
    if lacking := [name for name in facts["present"] if not is_installed(name)]:
        print(
            f"warning: {sys.executable} lacks {', '.join(lacking)}, which the kit leaves out because PRESENT named "
            "them; steps that need them will fail. Pack the kit again without these names.",
            file=sys.stderr,
        )
    scratch = Path(tempfile.mkdtemp(prefix="repro-gpu-day-"))
    for name in ("source", "packages"):
        shutil.copytree(KIT / name, scratch / "kit" / name, symlinks=True)
    for folder, _, _ in os.walk(scratch):
        os.chmod(folder, 0o755)  # folders of a read-only kit take no byte code, and cannot be deleted
    paths = [str(scratch / "kit" / "source"), str(scratch / "kit" / "packages")]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *given]), "PYTHONSAFEPATH": "1"}
    command = [
        sys.executable,
        "-c",
        "from repro.cli import main; raise SystemExit(main())",
        "gpu-day",
        *sys.argv[1:],
    ]
    sys.stdout.flush()
    os.execve(sys.executable, [*command, "--scratch", str(scratch)], environment)


def is_installed(package: str) -> bool:
    """Return whether this Python has `package`."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
