"""How the controller of an allocation and its agents talk: JSON lines over TCP, proved by a shared token.

The controller listens and says where in a file beside the submission that only the user can read; agents
connect.  Each side proves that it knows the token without sending it.  Whoever says nothing for `LOST_S`
is lost, and so is whoever's connection ends.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]

BEAT_S = 1.0
"""Each side says something at least this often."""
LOST_S = 15.0
"""Without a word for this long the other side is lost: its node is down, or the network between them."""
CONNECT_S = 300.0
"""How long an agent looks for its controller, and a controller for its agents: nodes may boot one by one."""
_SHAKE_S = 10.0
_STRANGER_BYTES = 1 << 16


class Lost(Exception):
    """The other side is gone; `str` says how that was seen."""


class Link:
    """One connection.  Sending and receiving never wait."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._in, self._out = bytearray(), bytearray()
        self._unread: list[Message] = []
        self._ended = ""
        self.heard = self.said = time.monotonic()

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Our own address on this connection."""
        return str(self._socket.getsockname()[0])

    @property
    def waiting(self) -> bool:
        """Whether something is yet to be sent."""
        return bool(self._out)

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished line."""
        return len(self._in)

    def send(self, message: Message) -> None:
        """Send `message`, or keep what does not go now for `flush`."""
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.said = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Send what goes now."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                try:
                    sent = self._socket.send(self._out)
                except BlockingIOError:
                    raise
                except OSError as error:
                    self._out.clear()
                    self._ended = self._ended or f"connection lost ({error.strerror or error})"
                    return
                del self._out[:sent]

    def receive(self) -> list[Message]:
        """What has come in.  Raises `Lost` when the connection has ended and all was handed over."""
        while not self._ended:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError as error:
                self._ended = f"connection lost ({error.strerror or error})"
                break
            if not data:
                self._ended = "its process ended"
                break
            self._in += data
            self.heard = time.monotonic()
        *lines, rest = bytes(self._in).split(b"\n") if b"\n" in self._in else (bytes(self._in),)
        if not lines and not self._unread and self._ended:
            raise Lost(self._ended)
        self._in = bytearray(rest)
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            raise Lost("it sent something that is no message") from None
        if not all(isinstance(message, dict) for message in found):
            raise Lost("it sent something that is no message")
        found, self._unread = self._unread + found, []
        return found

    def wait(self, seconds: float) -> list[Message]:
        """Wait until something comes, or until time is up: `[]`.  For the side that has one connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting else 0))
            selector.select(0.0 if self._unread else max(0.0, seconds))
        self.flush()
        return self.receive()

    def next(self, seconds: float) -> Message:
        """The next message alone; what comes in with it is for later.  Raises `Lost` when time is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.wait(end - time.monotonic()):
                self._unread = found[1:]
                return found[0]
        raise Lost(f"no answer within {seconds:g} s")

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


# -- where the controller is -----------------------------------------------------------------------


class Place(NamedTuple):
    """What an agent must know to connect."""

    address: str
    port: int
    token: str


def file_of(folder: Path, job: str, restarts: int) -> Path:
    """The file that says where the controller is: one for every start of a job, so that none reads a stale one."""
    return folder / f"channel-{job}-{restarts}.json"


def publish(path: Path, place: Place) -> None:
    """Write `place` so that only the user can read it, and a reader sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(place._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def find(path: Path) -> Place | None:
    """What `publish` wrote; None while there is nothing."""
    with contextlib.suppress(OSError):  # NFS remembers that a file is not there, unless the folder is read
        os.listdir(path.parent)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Place(str(document["address"]), int(document["port"]), str(document["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- who speaks ------------------------------------------------------------------------------------


def new_token() -> str:
    """Sixteen random bytes, as hex digits."""
    return secrets.token_hex(16)


def proof(token: str, nonce: str, side: str) -> str:
    """What only someone with the token can answer to `nonce`; `side` keeps one side's from serving the other."""
    return hmac.new(token.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


def connect(path: Path, hello: Message, seconds: float = CONNECT_S) -> tuple[Link, Message]:
    """Find the controller that `path` names and greet it; the connection and its welcome.

    A stale file names a place where nobody answers, or where the token is not known: it is read again
    until time is up.  Raises `Lost`.
    """
    end = time.monotonic() + seconds
    problem = f"no controller has written {path}"
    while time.monotonic() < end:
        place = find(path)
        if place is not None:
            try:
                return _greet(place, hello)
            except (OSError, Lost) as error:
                problem = f"{place.address} port {place.port}: {error}"
        time.sleep(0.1)
    raise Lost(f"no controller within {seconds:g} s: {problem}")


def _greet(place: Place, hello: Message) -> tuple[Link, Message]:
    link = Link(socket.create_connection((place.address, place.port), timeout=_SHAKE_S))
    try:
        challenge = link.next(_SHAKE_S)
        nonce = new_token()
        link.send(
            {**hello, "proof": proof(place.token, str(challenge.get("nonce")), "agent"), "nonce": nonce}
        )
        welcome = link.next(_SHAKE_S)
        given = str(welcome.get("proof"))
        if not hmac.compare_digest(given, proof(place.token, nonce, "controller")):
            raise Lost(str(welcome.get("refused") or "it does not know the token"))
    except BaseException:
        link.close()
        raise
    return link, welcome


class Door:
    """The controller's side of the greeting: strangers come in, and go on as members or not at all."""

    def __init__(self, address: str, admit: Callable[[Message], Message | str]):
        """`admit` gets a proven hello and returns the welcome, or why the agent is refused."""
        self.token = new_token()
        self._admit = admit
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._strangers: dict[Link, str] = {}

    def fileno(self) -> int:
        """For `selectors`."""
        return self._listener.fileno()

    def open(self) -> list[Link]:
        """Let in whoever knocks; the connections to be listened to."""
        new: list[Link] = []
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return new
            except OSError:  # it has gone again
                continue
            link = Link(sock)
            self._strangers[link] = new_token()
            link.send({"nonce": self._strangers[link]})
            new.append(link)

    def knows(self, link: Link) -> bool:
        """Whether `link` is still a stranger's."""
        return link in self._strangers

    def greet(self, link: Link) -> Message | None:
        """The hello of the stranger behind `link`, welcomed; None so far.  Raises `Lost`: not let in."""
        nonce = self._strangers[link]
        try:
            messages = link.receive()
            if link.buffered > _STRANGER_BYTES:
                raise Lost("too long a greeting")
            if not messages:
                return None
            hello = messages[0]
            if not hmac.compare_digest(str(hello.get("proof")), proof(self.token, nonce, "agent")):
                link.send({"refused": "wrong token"})
                raise Lost("wrong token")
            welcome = self._admit(hello)
            if isinstance(welcome, str):
                link.send({"refused": welcome})
                raise Lost(welcome)
        except Lost:
            del self._strangers[link]
            raise
        del self._strangers[link]
        link.send({**welcome, "proof": proof(self.token, str(hello.get("nonce")), "controller")})
        return hello

    def late(self) -> list[Link]:
        """Strangers that have not said who they are in time; they are forgotten."""
        now = time.monotonic()
        gone = [link for link in self._strangers if now - link.heard > _SHAKE_S]
        for link in gone:
            del self._strangers[link]
        return gone

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
