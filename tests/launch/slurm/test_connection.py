"""Tests of the connection between a task and its controller: messages, rejected clients and lost peers."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from repro.launch.slurm.allocation.connection import TASK_ENDED, Connection, Listener, Message
from tests.launch.runs import wait_for


@pytest.fixture
def listener() -> Iterator[Listener]:
    created = Listener("127.0.0.1", token="secret")
    yield created
    created.close()
    created.close()  # a second close has no effect


def connect(listener: Listener) -> Connection:
    return Connection("127.0.0.1", listener.port, token="secret", rank=3)


def receive(
    listener: Listener, until: Callable[[], bool] | None = None, count: int = 0
) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []

    def enough() -> bool:
        found.extend(listener.messages())
        return until() if until else len(found) >= count

    wait_for(enough, 10)
    return found


def test_sockets_detect_closed_and_silent_peers(listener: Listener) -> None:
    """After 5 s of silence, the kernel sends two probes, 5 s apart. Sent data has the same timeout of 15 s."""
    task = connect(listener)
    receive(listener, lambda: listener.has_connected(3))
    (other,) = listener._rank_of
    for sock in (task._socket, other):
        options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        values = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options}
        assert values == dict(zip(options, (5, 5, 2, 15_000), strict=True))
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    listener.close()
    task.wait(10)
    assert not task.open

    def refused() -> bool:
        task.send({"say": "x" * 100_000})
        return not task.open

    task.open = True
    wait_for(refused, 10)


def test_messages_may_arrive_in_pieces_or_together(listener: Listener) -> None:
    hello = json.dumps({"token": "secret", "rank": 1}).encode()
    with socket.create_connection(("127.0.0.1", listener.port)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.sendall(hello[:7])
        receive(listener, lambda: any(bytes(buffer) == hello[:7] for buffer in listener._unfinished.values()))
        raw.sendall(hello[7:] + b'\n{"say": 1}\n{"say": 2}\n{"sa')
        assert receive(listener, count=2) == [(1, {"say": 1}), (1, {"say": 2})]
        raw.sendall(b'y": "' + b"x" * (1 << 17) + b'"}\nno json\n')
        assert receive(listener, count=1) == [(1, {"say": "x" * (1 << 17)})], "long messages are accepted"
        assert (listener.has_connected(1), listener.has_connected(0), listener.ended) == (True, False, {})
    assert receive(listener, lambda: bool(listener.ended)) == []
    assert (listener.has_connected(1), listener.ended) == (True, {1: TASK_ENDED})


@pytest.mark.parametrize(
    ("accepted", "rejected"),
    [
        (b"", b"GET / HTTP/1.1\r\n"),
        (b"", b'{"token": "guessed", "rank": 0}\n'),
        (b"", b'{"rank": 0}\n'),
        (b"", b'{"token": "secret"}\n'),
        (b"", b'{"token": "secret", "rank": "none"}\n'),
        (b"", b"[1]\n"),
        (b"x" * (1 << 16), b"x"),
    ],
    ids=["http", "another token", "no token", "no rank", "no number", "no object", "too long"],
)
def test_client_without_token_is_disconnected(listener: Listener, accepted: bytes, rejected: bytes) -> None:
    """The listener waits for the rest of the line after the `accepted` bytes."""
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as raw:
        raw.sendall(accepted)
        receive(listener, lambda: [bytes(buffer) for buffer in listener._unfinished.values()] == [accepted])
        raw.sendall(rejected)
        assert receive(listener, lambda: not listener._unfinished) == []
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    assert (listener.ended, listener.has_connected(0)) == ({}, False)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ETIMEDOUT, "no answer from the node for 15 s"),
        (errno.EHOSTUNREACH, "no answer from the node for 15 s"),
        (errno.ECONNRESET, "connection lost (Connection reset by peer)"),
    ],
)
def test_error_of_a_lost_connection_is_reported(listener: Listener, number: int, message: str) -> None:
    class Broken(socket.socket):
        def recv(self, *_: Any) -> bytes:
            raise OSError(number, os.strerror(number))

    ours, theirs = socket.socketpair()
    broken = Broken(fileno=ours.detach())
    listener._selector.register(broken, selectors.EVENT_READ)
    listener._unfinished[broken], listener._rank_of[broken] = bytearray(), 2
    with theirs:
        theirs.sendall(b"x")
        assert listener.messages() == []
    assert listener.ended == {2: message}
    assert broken.fileno() == -1


@pytest.mark.parametrize(
    ("error", "open"),
    [(TimeoutError("ours"), True), (TimeoutError(errno.ETIMEDOUT, "kernel"), False), (OSError(104, "reset"), False)],
)  # fmt: skip
def test_only_kernel_errors_close_the_connection(listener: Listener, error: OSError, open: bool) -> None:
    task = connect(listener)
    with task._socket:
        task._socket = silent = MagicMock()
        silent.recv.side_effect = error
        task.wait(0.25)
    assert (task.open, silent.settimeout.call_args_list) == (open, [call(0.25), call(None)])
