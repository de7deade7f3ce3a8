"""TCP connections from the task of each rank to the controller, which report the rank's state and detect lost tasks.

Messages are JSON lines from task to controller.  When the controller closes the connection or is lost, the task kills
its rank and ends.  The kernel detects a host that does not answer (TCP keepalive).  A task authenticates with a token
from a file that only the user can read.
"""

from __future__ import annotations

import errno
import hmac
import json
import selectors
import socket
from typing import Any

Message = dict[str, Any]

KEEPALIVE_TIMEOUT_S = 15
"""Timeout of an answer, in seconds, after which a host is lost: the node or the network has failed."""
_MAX_UNAUTHENTICATED_BYTES = 1 << 16
TASK_ENDED = "its task ended without a word"


def _notice_silence(sock: socket.socket) -> None:
    """Let the kernel end the connection when the other host does not answer for `KEEPALIVE_TIMEOUT_S`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_TIMEOUT_S // 3),
        (socket.TCP_KEEPINTVL, KEEPALIVE_TIMEOUT_S // 3),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """Task's end of the connection."""

    def __init__(self, address: str, port: int, *, token: str, rank: int):
        """Connect to the controller.  Raises `OSError` if there is no controller."""
        self._socket = socket.create_connection((address, port), timeout=KEEPALIVE_TIMEOUT_S)
        self._socket.settimeout(None)
        _notice_silence(self._socket)
        self.address = str(self._socket.getsockname()[0])
        """Address of this host on the connection."""
        self.open = True
        """Whether the controller is connected."""
        self.send({"token": token, "rank": rank})

    def send(self, message: Message) -> None:
        """Send one message; without effect on a lost connection."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            self.open = False

    def wait(self, seconds: float) -> None:
        """Wait until the time has passed or the connection ends."""
        self._socket.settimeout(seconds)
        try:
            self.open &= self._socket.recv(1) != b""
        except OSError as error:
            # The socket's own timeout has no error number, a timeout of the kernel has one.
            self.open &= isinstance(error, TimeoutError) and not error.errno
        self._socket.settimeout(None)


class Listener:
    """Controller's end: connections of all tasks of one launch.  No method blocks."""

    def __init__(self, address: str, *, token: str):
        self._token = token
        self._server = socket.create_server((address, 0), backlog=1024)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._rank_of: dict[socket.socket, int] = {}
        self._unfinished: dict[socket.socket, bytearray] = {}
        self.ended: dict[int, str] = {}
        """End of each rank's connection: `TASK_ENDED`, or the reason of its loss."""

    def messages(self) -> list[tuple[int, Message]]:
        """Return the received messages with their ranks."""
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._server:
                self._accept()
            else:
                found += self._read(sock)
        return found

    def has_connected(self, rank: int) -> bool:
        """Return whether the task of `rank` has ever connected."""
        return rank in self.ended or rank in self._rank_of.values()

    def close(self) -> None:
        """Close all connections, which ends the ranks."""
        for sock in [*self._unfinished]:
            self._drop(sock)
        if self._server.fileno() >= 0:
            self._server.close()
            self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:  # no further connection, or one that has closed again
                return
            sock.setblocking(False)
            _notice_silence(sock)
            self._unfinished[sock] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> list[tuple[int, Message]]:
        ended = ""
        buffer = self._unfinished[sock]
        while not ended:
            try:
                data = sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError as error:
                silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH)
                ended = f"connection lost ({error.strerror})"
                ended = f"no answer from it for {KEEPALIVE_TIMEOUT_S} s" if silent else ended
                break
            buffer += data
            ended = "" if data else TASK_ENDED
        *lines, rest = bytes(buffer).split(b"\n")
        self._unfinished[sock] = bytearray(rest)
        known = [message for line in lines if (message := self._known(sock, line)) is not None]
        stranger = sock not in self._rank_of
        if not stranger and ended:
            self.ended[self._rank_of[sock]] = ended
        if ended or (stranger and (lines or len(rest) > _MAX_UNAUTHENTICATED_BYTES)):
            self._drop(sock)
        return known

    def _known(self, sock: socket.socket, line: bytes) -> tuple[int, Message] | None:
        """Return a message of an authenticated task; the first message of a connection has its token and rank."""
        try:
            message = json.loads(line)
            if sock in self._rank_of:
                return self._rank_of[sock], message
            if hmac.compare_digest(str(message["token"]), self._token):
                self._rank_of[sock] = int(message["rank"])
        except (ValueError, KeyError, TypeError):
            pass
        return None

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._unfinished.pop(sock, None)
        self._rank_of.pop(sock, None)
        sock.close()
