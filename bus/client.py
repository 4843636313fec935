"""A peer's line to the controller: joins, hears what is published, notices gaps and silence, joins again by itself.

It delivers events and decides nothing about updates: a rollout node feeds them to a `Participant`, a trainer to
a `Source`. What it concludes from what it hears is in `hearing.py`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Self

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from bus.codec import EVENT_CODEC
from bus.errors import CodecError, ControllerUnreachable, JoinFailed, PeerGone
from bus.events import (
    Envelope,
    Event,
    JoinAccepted,
    JoinRefused,
    JoinRequested,
    NodeAlive,
    NodeCapabilities,
    NodeLeft,
    Peer,
    Reason,
    Role,
    Served,
    SnapshotRequested,
)
from bus.hearing import Heard, Hearing
from bus.tasks import background_tasks
from bus.transport import Dealer, Subscriber

logger = logging.getLogger(__name__)

JOIN_RETRY_SECONDS: Final = 0.5
INBOX_EVENTS: Final = 10_000
"""Events that may wait for a slow peer; beyond that the connection stops reading, and the socket's limit applies."""


def new_peer(node: str | None = None) -> Peer:
    """A peer with a fresh incarnation; without a name it is called after its host and process."""
    return Peer(node or f"{socket.gethostname()}-{os.getpid()}", secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Joined:
    """The connection joined a controller run; whatever was under way with an earlier one is over."""

    run: str


class Connection:
    """One peer's line to the controller; opened with `Connection.open`, closed by leaving the block."""

    def __init__(
        self,
        dealer: Dealer,
        address: str,
        join: JoinRequested,
        served: Callable[[], Iterable[Served]],
        taken_patience: float,
    ) -> None:
        self.address = address
        self.peer = join.peer
        self._dealer = dealer
        self._join = join
        self._served = served
        self._taken_patience = taken_patience
        self._refusal: JoinFailed | None = None
        self._welcome = JoinAccepted(join.peer, "", JOIN_RETRY_SECONDS, 1.0, ())
        self._hearing = Hearing(join.peer, "", self._welcome.lease, 0.0)
        self._lost = anyio.Event()
        self._following = anyio.Event()
        self._deliver: MemoryObjectSendStream[Event | Joined]
        self._inbox: MemoryObjectReceiveStream[Event | Joined]
        self._deliver, self._inbox = anyio.create_memory_object_stream[Event | Joined](INBOX_EVENTS)

    def __repr__(self) -> str:
        return (
            f"<Connection of {self.peer} to {self.address}, run {self._hearing.run}, sequence {self._hearing.sequence}>"
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        address: str,
        peer: Peer,
        role: Role,
        *,
        adapters: tuple[str, ...] = (),
        capabilities: NodeCapabilities | None = None,
        store: str = "",
        served: Callable[[], Iterable[Served]] = tuple,
        timeout: float | None = None,
        taken_patience: float = 0.0,
    ) -> AsyncIterator[Self]:
        """Join the controller at `address`, and stay joined until the block is left.

        `served` is asked for what to report with each heartbeat. `timeout` bounds the first join, in seconds
        (None: wait for a controller as long as it takes). For `taken_patience` seconds an adapter that is taken is
        asked for again: the lease of a trainer that died has to end first. Raises `ControllerUnreachable`,
        `InvalidAddress`, or `JoinFailed`; a refusal later on raises `JoinFailed` out of the block.
        """
        join = JoinRequested(peer, role, adapters, capabilities, store)
        identity = f"{peer.node}/{peer.incarnation}".encode()
        async with Dealer.open(address, identity) as dealer:
            connection = cls(dealer, address, join, served, taken_patience)
            # The inbox closes after the tasks that fill it have ended.
            with connection._deliver, connection._inbox:
                async with background_tasks() as tasks:
                    with anyio.move_on_after(timeout) as patience:
                        await connection._join_controller()
                    if patience.cancelled_caught:
                        raise connection._refusal or ControllerUnreachable(address, timeout or 0.0)
                    tasks.start_soon(connection._stay_joined)
                    try:
                        yield connection
                    finally:
                        connection.send(NodeLeft(peer))

    @property
    def lease(self) -> float:
        """How long a peer may be silent before it counts as lost, in seconds, as the controller said."""
        return self._welcome.lease

    @property
    def gaps(self) -> int:
        """How often published events of this controller run were missed, and asked for."""
        return self._hearing.gaps

    async def receive(self) -> Event | Joined:
        """The next event, published or sent to this peer, in order of arrival; cancelling is safe."""
        return await self._inbox.receive()

    async def wait_following(self) -> None:
        """Wait until what the controller publishes arrives here."""
        await self._following.wait()

    def send(self, event: Event) -> None:
        """Queue an event for the controller; while it is away the socket keeps a bounded number, then drops."""
        try:
            self._dealer.send_nowait(EVENT_CODEC.encode(Envelope(self._hearing.run, 0, event)))
        except PeerGone as error:
            logger.warning("%s: a %s was dropped: %s", self.peer, type(event).__name__, error)

    async def _join_controller(self) -> None:
        """Ask until somebody answers; raises `JoinFailed` if that is a no."""
        begun = anyio.current_time()
        while True:
            self.send(replace(self._join, served=tuple(self._served())))
            with anyio.move_on_after(JOIN_RETRY_SECONDS):
                while True:
                    envelope = _decoded(await self._dealer.receive())
                    match envelope and (envelope.run, envelope.event):
                        case (run, JoinAccepted(peer=self.peer) as welcome):
                            self._welcome = welcome
                            self._hearing = Hearing(self.peer, run, welcome.lease, anyio.current_time())
                            self._lost = anyio.Event()
                            await self._deliver.send(Joined(run))
                            return
                        case (_, JoinRefused(reason=reason, detail=detail)):
                            waited = anyio.current_time() - begun
                            self._refusal = JoinFailed(self.peer.node, reason, detail)
                            if reason is not Reason.ADAPTER_TAKEN or waited > self._taken_patience:
                                raise self._refusal

    async def _stay_joined(self) -> None:
        """Follow one controller run after another."""
        while True:
            async with background_tasks() as tasks, Subscriber.open(self._welcome.events) as subscriber:
                tasks.start_soon(self._hear_published, subscriber)
                tasks.start_soon(self._hear_direct)
                tasks.start_soon(self._watch)
                tasks.start_soon(self._beat)
                await self._lost.wait()
                tasks.cancel_scope.cancel()
            logger.warning("%s lost the controller at %s; joining again", self.peer, self.address)
            self._following = anyio.Event()
            await self._join_controller()

    async def _hear_published(self, subscriber: Subscriber) -> None:
        while True:
            envelope = _decoded(await subscriber.receive())
            if envelope is not None:
                await self._act(self._hearing.published(envelope, anyio.current_time()))

    async def _hear_direct(self) -> None:
        while True:
            envelope = _decoded(await self._dealer.receive())
            if envelope is not None:
                await self._act(self._hearing.sent(envelope, anyio.current_time()))

    async def _act(self, heard: Heard) -> None:
        if heard.lost:
            self._lost.set()
        if heard.missed:
            self.send(SnapshotRequested(self.peer))
            self._following.set()
        if heard.event is not None:
            await self._deliver.send(heard.event)

    async def _watch(self) -> None:
        """A controller not heard for a lease is gone: nothing else tells a silent link from a quiet one."""
        while True:
            if self._hearing.is_lost(anyio.current_time()):
                self._lost.set()
            silence = self._hearing.silence(anyio.current_time())
            await anyio.sleep(max(self._welcome.lease - silence, self._welcome.heartbeat))

    async def _beat(self) -> None:
        while True:
            self.send(NodeAlive(self.peer, self._hearing.sequence or 0, tuple(self._served())))
            await anyio.sleep(self._welcome.heartbeat)


def _decoded(frame: bytes) -> Envelope | None:
    try:
        return EVENT_CODEC.decode(frame)
    except CodecError as error:
        logger.warning("dropped a frame of %d bytes from the controller: %s", len(frame), error)
        return None
