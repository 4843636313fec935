"""The controller's shell: runs a `Coordinator` over sockets, a journal and the event loop's clock.

It decides nothing. A frame comes in, is decoded, checked against who sent it, and handed to the coordinator; the
effects that come out are performed in order, each published event after its journal entry. What a controller that
is restarted on the same journal does is the coordinator's `restore`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import anyio
from anyio.abc import TaskGroup

from bus.codec import EVENT_CODEC
from bus.coordinator import Coordinator
from bus.errors import CodecError, PeerGone
from bus.events import (
    ControllerStarted,
    Envelope,
    Event,
    JoinAccepted,
    Peer,
    StatusReported,
    UpdateAborted,
    VersionCommitted,
)
from bus.journal import Journal, SqliteJournal
from bus.protocol import Effect, Publish, Record, Send, Timeouts
from bus.tasks import background_tasks
from bus.transport import Publisher, Router, advertised

logger = logging.getLogger(__name__)

DEFAULT_BIND: Final = "tcp://127.0.0.1:5870"


class Controller:
    """One controller; `address` is what users give their nodes. Opened with `Controller.open`."""

    def __init__(self, router: Router, publisher: Publisher, journal: Journal, timeouts: Timeouts) -> None:
        self.address = advertised(router.address)
        self.run = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self._router = router
        self._publisher = publisher
        self._journal = journal
        self._coordinator = Coordinator(self.run, publisher.address, timeouts)
        self._published = 0
        self._moved = anyio.Event()

    def __repr__(self) -> str:
        return f"<Controller {self.address} run {self.run}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, bind: str = DEFAULT_BIND, *, journal: Path | str = ":memory:", timeouts: Timeouts | None = None
    ) -> AsyncIterator[Self]:
        """A running controller; leaving the block stops it.

        `bind` is a `tcp://host:port` (port 0: the OS picks) for requests; events get a port of their own on the
        same host. Raises `AddressInUse`, `InvalidAddress`, or `JournalError`.
        """
        host = bind.rpartition(":")[0]
        with SqliteJournal(journal) as opened:
            async with (
                Router.open(bind) as router,
                Publisher.open(f"{host}:0") as publisher,
                background_tasks() as tasks,
            ):
                controller = cls(router, publisher, opened, timeouts or Timeouts())
                controller._start(tasks)
                yield controller

    def _start(self, tasks: TaskGroup) -> None:
        restored = self._coordinator.restore(entry.event for entry in self._journal.entries())
        self._perform([Publish(ControllerStarted(self.address)), *restored])
        tasks.start_soon(self._listen)
        tasks.start_soon(self._keep_time)
        tasks.start_soon(self._beat)
        logger.info("controller listens on %s, journal at sequence %d", self.address, self._journal.sequence)

    async def _listen(self) -> None:
        while True:
            identity, frame = await self._router.receive()
            try:
                event = EVENT_CODEC.decode(frame).event
                peer = self._sender(identity, event)
            except CodecError as error:
                self.counters["malformed"] += 1
                logger.warning("dropped a frame of %d bytes: %s", len(frame), error)
                continue
            self._perform(self._coordinator.handle(event, peer, anyio.current_time()))

    def _sender(self, identity: bytes, event: Any) -> Peer:
        """Who sent an event: the connection says, and what the event says of itself must agree."""
        node, _, incarnation = identity.decode(errors="replace").rpartition("/")
        peer = Peer(node, incarnation)
        if getattr(event, "peer", peer) != peer:
            raise CodecError(f"{peer.node} sent a {type(event).__name__} in the name of {event.peer.node}")
        return peer

    async def _keep_time(self) -> None:
        """Wake the coordinator at its next deadline, whenever that moves."""
        while True:
            self._moved = anyio.Event()
            deadline = self._coordinator.next_deadline()
            with anyio.CancelScope(deadline=float("inf") if deadline is None else deadline):
                await self._moved.wait()
            now = anyio.current_time()
            if deadline is not None and now - deadline > self._coordinator.timeouts.heartbeat:
                # This process slept, so nobody could be heard: silence counts from now.
                self._coordinator.forgive_silence(now)
            self._perform(self._coordinator.handle_time(now))

    async def _beat(self) -> None:
        while True:
            alive = self._coordinator.heartbeat(self._published)
            self._publisher.send_nowait(EVENT_CODEC.encode(Envelope(self.run, 0, alive)))
            await anyio.sleep(self._coordinator.timeouts.heartbeat)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(event):
                    frame = self._journal.append(self.run, event, time.time(), self._published)
                    self._published = self._journal.sequence
                    self._publisher.send_nowait(frame)
                    _log(event)
                case Record(event):
                    self._journal.append(self.run, event, time.time(), self._published)
                case Send(peer, event):
                    self._send(peer, event)
        self._moved.set()

    def _send(self, peer: Peer, event: Event) -> None:
        match event:
            case JoinAccepted():
                # A wildcard bind is no address: each peer is told the one that it can reach.
                event = replace(event, events=advertised(event.events))
            case StatusReported():
                counters = Counter(dict(event.counters)) + self.counters + Counter(dropped=self._router.dropped)
                event = replace(event, sequence=self._journal.sequence, counters=tuple(sorted(counters.items())))
        try:
            self._router.send_nowait(
                f"{peer.node}/{peer.incarnation}".encode(), EVENT_CODEC.encode(Envelope(self.run, 0, event))
            )
        except PeerGone as error:
            logger.info("%s", error)
            if not isinstance(event, (JoinAccepted, StatusReported)):
                self.counters["unroutable"] += 1


def _log(event: Event) -> None:
    match event:
        case VersionCommitted(attempt=attempt, digest=digest):
            logger.info("%s committed, %s", attempt, digest)
        case UpdateAborted():
            logger.warning("%s aborted: %s on %s: %s", event.attempt, event.phase, event.node or "-", event.detail)
        case _:
            logger.debug("%r", event)
