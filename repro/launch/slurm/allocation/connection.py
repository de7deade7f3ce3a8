"""TCP connections between ranks' tasks and the controller of a SLURM job: state messages, detection of lost nodes.

Tasks send JSON lines. When the controller closes the connection or dies, the task kills its rank and ends. TCP
keepalive detects unreachable hosts, and a token from a file that only the user can read authenticates a task.
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
"""Time in seconds without an answer from a host, after which the TCP connection to the host counts as lost."""
_MAX_UNAUTHENTICATED_BYTES = 1 << 16
"""Maximum bytes that an unauthenticated client may send, so that the client cannot fill the controller's memory."""
TASK_ENDED = "the rank's task ended without a report"


def _notice_silence(sock: socket.socket) -> None:
    """Configure TCP keepalive, so that the kernel ends a connection after `KEEPALIVE_TIMEOUT_S` without answers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_TIMEOUT_S // 3),
        (socket.TCP_KEEPINTVL, KEEPALIVE_TIMEOUT_S // 3),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """TCP connection from the task of a rank to the controller of the SLURM job."""

    def __init__(self, address: str, port: int, *, token: str, rank: int):
        """Connect to the controller and send the authentication token.  Raises `OSError` if no controller listens."""
        self._socket = socket.create_connection((address, port), timeout=KEEPALIVE_TIMEOUT_S)
        self._socket.settimeout(None)
        _notice_silence(self._socket)
        self.address = str(self._socket.getsockname()[0])
        """IP address of this host's network interface that reaches the controller."""
        self.open = True
        """Whether the connection to the controller still exists."""
        self.send({"token": token, "rank": rank})

    def send(self, message: Message) -> None:
        """Send one message to the controller; a lost connection only sets `open` to False."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            self.open = False

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until the connection to the controller ends."""
        self._socket.settimeout(seconds)
        try:
            self.open &= self._socket.recv(1) != b""
        except OSError as error:
            # The timeout of `settimeout` has no error number. A TCP keepalive timeout has one: the connection is lost.
            self.open &= isinstance(error, TimeoutError) and not error.errno
        self._socket.settimeout(None)


class Listener:
    """The controller's server socket with the connections of all tasks of one launch.  No method blocks."""

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
        """Reason for the end of each closed connection, by rank: `TASK_ENDED`, or the cause of a lost connection."""

    def messages(self) -> list[tuple[int, Message]]:
        """Return the messages received since the last call, each with the rank of its task."""
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
        """Return whether the task of `rank` has connected, even if the connection has ended."""
        return rank in self.ended or rank in self._rank_of.values()

    def close(self) -> None:
        """Close all connections, upon which every task kills its rank."""
        for sock in [*self._unfinished]:
            self._drop(sock)
        if self._server.fileno() >= 0:
            self._server.close()
            self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:  # No client is waiting, or the client has closed its connection.
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
                ended = f"no answer from the node for {KEEPALIVE_TIMEOUT_S} s" if silent else ended
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
        """Return rank and message of a task's `line`; None for its first line, which authenticates the task."""
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
