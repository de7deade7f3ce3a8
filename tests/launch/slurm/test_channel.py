"""The connection of an agent and its controller: nothing that is said gets lost, whatever it comes together with."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from repro.launch.slurm import channel

TOKEN = "0123456789abcdef"


def greet_and_order(server: socket.socket, order: dict[str, str]) -> None:
    """A controller whose welcome and first order leave in one piece, and which then goes."""
    connection, _ = server.accept()
    with connection, connection.makefile("r", encoding="utf-8") as lines:
        connection.sendall(b'{"nonce":"n"}\n')
        hello = json.loads(lines.readline())
        welcome = {"proof": channel.proof(TOKEN, hello["nonce"], "controller")}
        connection.sendall(f"{json.dumps(welcome)}\n{json.dumps(order)}\n".encode())


def test_an_order_that_comes_with_the_welcome_is_heard(tmp_path: Path) -> None:
    """An agent that dropped it would wait for ever for what it has been told."""
    order = {"do": "port", "address": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = channel.Place("127.0.0.1", server.getsockname()[1], TOKEN)
        channel.publish(tmp_path / "channel.json", place)
        controller = threading.Thread(target=greet_and_order, args=(server, order))
        controller.start()
        link, welcome = channel.connect(tmp_path / "channel.json", {}, seconds=10)
        controller.join(10)
    assert "proof" in welcome
    assert link.wait(10) == [order]
    with pytest.raises(channel.Lost, match="its process ended"):
        link.wait(10)
    link.close()
