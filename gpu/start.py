"""Copy the kit to a temporary folder and start `repro gpu-day` there. `gpu/run.sh` starts this file."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Replace this process by `repro gpu-day` on the copy, which deletes the copy at its end."""
    made_for = json.loads((KIT / "source" / "kit.json").read_text(encoding="utf-8"))["python"]
    here = ".".join(map(str, sys.version_info[:2]))
    if here != made_for:
        sys.exit(
            f"error: {sys.executable} is Python {here}, and the kit is for {made_for}; PYTHON=/path names another one"
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


if __name__ == "__main__":
    main()
