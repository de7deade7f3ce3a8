"""The agents of an allocation as their controller sees them: who has come, what they say, who is lost.

A thread keeps the connections alive whatever the controller is busy with; the controller reads what came in,
and says what is to be done, when it likes.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from repro.launch.slurm.channel import BEAT_S, LOST_S, Door, Link, Lost, Message, Place
from repro.launch.slurm.nodes import Report

END_S = 10.0
"""How long agents may take to end after their last order."""
GLANCE_S = 0.2
"""How often a wait looks again by itself: a signal's flag is no word of an agent."""


class Member:
    """One agent."""

    def __init__(self, report: Report):
        self.report = report
        self.lost = ""
        """How it was lost; empty while it is there."""
        self.ended = False
        self.outbox: list[Message] = []


class Crew:
    """All agents, by their task number."""

    def __init__(self, address: str, welcome: Message, *, lost_s: float = LOST_S):
        """`welcome` is what every agent is told first.  It listens at once; see `place`."""
        self.address, self._welcome, self._lost_s = address, welcome, lost_s
        self.members: dict[int, Member] = {}
        self.terminated = ""
        """Node whose agent got SIGTERM: SLURM is ending the job."""
        self._inbox: list[tuple[int, Message]] = []
        self._broken: BaseException | None = None
        self._leaving = False
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._told = 0
        """How often there was something that somebody may be waiting for."""
        self._door = Door(address, self._admit)
        self.place = Place(address, self._door.port, self._door.token)
        self._ear, self._bell = socket.socketpair()
        for sock in (self._ear, self._bell):
            sock.setblocking(False)
        self._links: dict[Link, int] = {}
        self._link_of: dict[int, Link] = {}
        self._addressed: set[int] = set()
        self._looked = time.monotonic()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)
        self._thread.start()

    # -- for the controller's thread ---------------------------------------------------------------

    def gather(self, tasks: int, seconds: float, given_up: Callable[[], bool]) -> bool:
        """Wait until `tasks` agents have come; False if time is up or `given_up()`."""

        def here() -> bool:
            self._check()
            return len(self.members) >= tasks

        self.wait_for(lambda: given_up() or here(), seconds)
        return not given_up() and here()

    def wait_for(self, what: Callable[[], bool], seconds: float) -> None:
        """Return as soon as `what()` holds, which is asked at every word of an agent and at every loss."""
        end = time.monotonic() + seconds
        told = self._told
        while not what() and (left := end - time.monotonic()) > 0 and self._broken is None:
            with self._news:
                if told == self._told:
                    self._news.wait(min(left, GLANCE_S))
                told = self._told

    def reports(self) -> list[Report]:
        """What the agents said of themselves, in the order of ranks: node by node, in blocks.

        Neighbours in rank share a node whatever way the site spreads tasks: layouts count on it.
        """
        with self._lock:
            found = [member.report for member in self.members.values()]
        return sorted(found, key=lambda report: (report.node_index, report.local))

    def messages(self) -> list[tuple[int, Message]]:
        """What came in since the last call, with the task that said it."""
        self._check()
        with self._lock:
            found, self._inbox = self._inbox, []
        return found

    def send(self, task: int, message: Message) -> None:
        """Say something to one agent; nothing happens if it is lost."""
        with self._lock:
            self.members[task].outbox.append(message)
            self._addressed.add(task)
        self._ring()

    def lost(self, task: int) -> str:
        """How the agent of `task` was lost, with its node; empty while it is there."""
        with self._lock:
            member = self.members[task]
            return f"{member.report.node}: {member.lost}" if member.lost else ""

    def losses(self) -> str:
        """The first loss of all; empty while everybody is there."""
        return next((text for task in sorted(self.members) if (text := self.lost(task))), "")

    def close(self, *, dismiss: bool) -> None:
        """Stop listening.  `dismiss`: the agents end well; otherwise they see their controller go."""
        if dismiss:
            with self._lock:
                self._leaving = True
                for task, member in self.members.items():
                    member.outbox.append({"do": "end"})
                    self._addressed.add(task)
            self._ring()
            self.wait_for(lambda: all(one.lost or one.ended for one in list(self.members.values())), END_S)
        self._over = True
        self._ring()
        self._thread.join(END_S)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._bell.send(b"!")

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the connections to the agents broke down") from self._broken

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._serve(selector)
        except BaseException as error:
            self._broken = error
            with self._news:
                self._tell()
            raise
        finally:
            self._door.close()
            for link in self._links:
                link.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._door, selectors.EVENT_READ)
        selector.register(self._ear, selectors.EVENT_READ)
        while not self._over:
            for key, _ in selector.select(BEAT_S / 2):
                if key.fileobj is self._door:
                    for link in self._door.open():
                        selector.register(link, selectors.EVENT_READ)
                elif key.fileobj is self._ear:
                    with contextlib.suppress(BlockingIOError):
                        self._ear.recv(4096)
                elif isinstance(key.fileobj, Link):
                    self._hear(key.fileobj, selector)
            self._speak(selector)

    def _hear(self, link: Link, selector: selectors.BaseSelector) -> None:
        try:
            link.flush()
            if self._door.knows(link):
                hello = self._door.greet(link)
                if hello is not None:
                    self._links[link] = int(hello["report"]["task"])
                    self._link_of[self._links[link]] = link
                return
            self._watch(link, selector)
            self._take(self._links[link], link.receive())
        except Lost as lost:
            self._drop(link, str(lost), selector)

    def _tell(self) -> None:
        """Wake whoever waits; the lock is held."""
        self._told += 1
        self._news.notify_all()

    def _take(self, task: int, messages: list[Message]) -> None:
        with self._news:
            for message in messages:
                if message.get("say") == "signal":
                    if message["number"] == signal.SIGTERM:
                        self.terminated = self.members[task].report.node
                elif message.get("say") != "beat":
                    self._inbox.append((task, message))
            self._tell()

    def _speak(self, selector: selectors.BaseSelector) -> None:
        """Pass on what is to be said, and twice a beat look at everybody: with many ranks a look has its price."""
        with self._lock:
            addressed, self._addressed = self._addressed, set()
        for task in addressed:
            if task in self._link_of:
                self._deliver(self._link_of[task], task, selector)
        now = time.monotonic()
        if now - self._looked < BEAT_S / 2:
            return
        self._looked = now
        for link in list(self._links):
            if now - link.said > BEAT_S:
                link.send({"do": "beat"})
            self._watch(link, selector)
            if now - link.heard > self._lost_s:
                self._drop(link, f"no word from its agent for {self._lost_s:g} s", selector)
        for link in self._door.late():
            selector.unregister(link)
            link.close()

    def _deliver(self, link: Link, task: int, selector: selectors.BaseSelector) -> None:
        with self._lock:
            orders, self.members[task].outbox = self.members[task].outbox, []
        for message in orders:
            link.send(message)
        self._watch(link, selector)

    def _watch(self, link: Link, selector: selectors.BaseSelector) -> None:
        """Wake when there is room for what could not be sent yet."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        if selector.get_key(link).events != events:
            selector.modify(link, events)

    def _drop(self, link: Link, why: str, selector: selectors.BaseSelector) -> None:
        selector.unregister(link)
        link.close()
        task = self._links.pop(link, None)
        if task is None:  # a stranger
            return
        del self._link_of[task]
        with self._news:
            if self._leaving:
                self.members[task].ended = True
            else:
                self.members[task].lost = why
            self._tell()

    def _admit(self, hello: Message) -> Message | str:
        try:
            report = Report(**hello["report"])
        except (KeyError, TypeError):
            return "no report of its node"
        with self._news:
            if report.task in self.members:
                return f"task {report.task} is here already"
            self.members[report.task] = Member(report)
            self._tell()
        return self._welcome


def welcome(*, interface: str, variables: dict[str, str], umask: int) -> dict[str, Any]:
    """What an agent has to know of the profile."""
    return {"interface": interface, "variables": variables, "umask": umask}
