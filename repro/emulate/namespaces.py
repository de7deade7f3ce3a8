"""Network namespaces without names: each is held by a small process and goes when that process goes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator

from repro.util.processes import die_with_parent

_NEWNET, _NEWUSER = 0x40000000, 0x10000000


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def become_root() -> bool:
    """Leave for a network namespace of this process's own, in a user namespace where only that is allowed.

    Whether it took one.  Raises `OSError` where neither is allowed.
    """
    try:
        _call("unshare", _NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", _NEWNET | _NEWUSER)
        for file, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(line)
        return True
    return False


class Namespace:
    """A network namespace, held by a child of this process that does nothing."""

    def __init__(self) -> None:
        parent, (here, there) = os.getpid(), socket.socketpair()
        self.holder = os.fork()
        if self.holder == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                die_with_parent(parent)
                _call("unshare", _NEWNET)
                there.send(b"+")
                while True:
                    signal.pause()
            os._exit(1)
        there.close()
        with here:
            if not here.recv(1):
                raise OSError("a network namespace could not be made")
        self.descriptor = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that are opened here belong to it, and `/proc/sys/net` is its own."""
        home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", self.descriptor, _NEWNET)
            yield
        finally:
            _call("setns", home, _NEWNET)
            os.close(home)
