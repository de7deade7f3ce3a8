"""Imitation of a kit's target machine: a Python with three packages only, no network, and a read-only kit."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PRESENT = ("torch", "numpy", "transformers")
"""Packages of the target, the value of PRESENT for `make gpu-kit`."""
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x1 | 0x40))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Program that starts the loopback interface (SIOCSIFFLAGS, IFF_UP | IFF_RUNNING) and then a command."""


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the installed distributions that `names` require, themselves included."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            required = (line for line in requires if "extra ==" not in line)
            pending += [match[0] for line in required if (match := re.match(r"[\w.-]+", line))]
    return found


def make_target(folder: Path) -> Path:
    """Return the Python of a new environment in `folder` that has only `PRESENT` and their requirements."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name in closure(PRESENT):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source = Path(str(package.locate_file(top)))
            if not (packages / top).exists():
                (packages / top).symlink_to(source)
    return folder / "bin" / "python"


def offline_command(kit: Path, command: list[str]) -> list[str]:
    """Return `command` in a network namespace with only the loopback interface, with `kit` mounted read-only."""
    mounted = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    up = [sys.executable, "-c", LOOPBACK_UP, *command]
    return ["unshare", "--map-root-user", "--net", "--mount", "bash", "-c", mounted, str(kit), *up]
