"""Sockets on asyncio and trio: opaque byte frames over ZeroMQ. The only zmq import of the project.

It knows nothing of events, msgpack or membership.

**How a receive waits.** The descriptor of a ZeroMQ socket signals commands in the socket's mailbox, not messages,
and any call on the socket may read the mailbox and so take the signal away (zmq_getsockopt(3), ZMQ_FD). Hence:

- A receive tries first and waits only after EAGAIN: the mailbox is empty then and every pipe has gone to sleep,
  so the next message must signal.
- A send reads the mailbox too. It looks at ZMQ_EVENTS afterwards and makes a parked receiver try again.
- One receiver a socket, and no other call on a socket than these. No signal can be lost, so nothing polls.
- Taking the message is the last step of a receive; no checkpoint follows it at which cancellation could lose it.

**One context a socket.** Its `term()` returns once that socket's last messages are out or the linger has passed,
so leaving an `open()` block is bounded, ends every thread of the socket, and needs no state shared by the process.

IMMEDIATE stays off: a join sent before the controller listens is delivered when it does. All sockets belong to
the event loop that opened them; none may be used from another thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NoReturn, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import zmq

from bus.addresses import advertised, bindable, is_ipv6, local_host_towards, only_ipv6
from bus.errors import AddressInUse, BusError, ChannelClosed, InvalidAddress, InvalidInput, PeerGone, TransportError

__all__ = [
    "HIGH_WATER_MARK",
    "LINGER_MS",
    "MAX_FRAME_BYTES",
    "Dealer",
    "Publisher",
    "Router",
    "Subscriber",
    "advertised",
    "local_host_towards",
]

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""The largest body. A peer that sends more is disconnected before its frame is read; others notice nothing."""

HIGH_WATER_MARK: Final = 1_000
"""Messages queued for one peer, and as many from it, before a send is refused."""

LINGER_MS: Final = 500
"""How long a closed socket still tries to deliver what it holds, in milliseconds."""

_CLOSE_SECONDS: Final = 1.5  # the bound on leaving open(); past LINGER_MS only a starved machine gets near it
_SUBSCRIPTIONS: Final = (b"\x00", b"\x01")  # how a SUB's "unsubscribe" and "subscribe" to everything reach an XPUB

_OPTIONS: Final[dict[int, int]] = {
    zmq.LINGER: LINGER_MS,
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    # A SUB never sends, so only these two notice a link that died without a word: the kernel's probes for a
    # silent connection, ZMTP's for one with unacknowledged bytes, where the kernel would retry for 15 minutes.
    # Ten seconds let a starved machine keep its links.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.HEARTBEAT_IVL: 2_000,
    zmq.HEARTBEAT_TIMEOUT: 10_000,
}

_PROBLEMS: Final = {
    errno.EINVAL: "ZeroMQ cannot read it",
    errno.EADDRNOTAVAIL: "not an address of this machine",
    errno.ENOENT: "the directory of this path does not exist",
}


class _Channel:
    """One socket and its context, driven by one event loop."""

    dropped: int
    """Messages thrown away because their frames were not those of this channel."""

    def __init__(self, kind: int, address: str) -> None:
        self.dropped = 0
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._receiver = anyio.ResourceGuard("receiving from")
        self._parked: anyio.CancelScope | None = None
        self._left = anyio.Event()
        self._open = True

    def __repr__(self) -> str:
        state = "closed" if not self._open else "receiver parked" if self._parked else "open"
        return f"<{type(self).__name__} {self.address} {state}>"

    async def _bind(self, bind: str) -> None:
        endpoint = await bindable(bind)
        if is_ipv6(endpoint):
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            _refuse(bind, error)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def _connect(self) -> None:
        if await only_ipv6(self.address):
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            _refuse(self.address, error)

    async def _receive(self, count: int) -> list[bytes]:
        with self._receiver:
            while True:
                # A flood must not keep the event loop for itself, nor a cancelled task go on.
                await anyio.lowlevel.checkpoint()
                self._check_open()
                try:
                    frames = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    await self._park()
                    continue
                if len(frames) == count:
                    return frames
                self.dropped += 1

    async def _park(self) -> None:
        """Waits for the descriptor, or until a send or the close cancels this scope to make the receiver look."""
        self._left = anyio.Event()
        try:
            with anyio.CancelScope() as self._parked:
                await anyio.wait_readable(self._descriptor)
        finally:
            self._parked = None
            self._left.set()

    def _send(self, *frames: bytes) -> None:
        self._check_open()
        if len(frames[-1]) > MAX_FRAME_BYTES:
            raise TransportError(
                f"a body of {len(frames[-1]):,} bytes is over the limit of {MAX_FRAME_BYTES:,}; "
                f"tensors travel through the collective, not here"
            )
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        finally:
            if self._parked is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._parked.cancel()

    def _check_open(self) -> None:
        if not self._open:
            raise ChannelClosed(f"{type(self).__name__} {self.address}")

    async def _close(self) -> None:
        self._open = False
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            try:
                if self._parked is not None:
                    # The descriptor's number is free for others once the socket is closed: a receiver that was
                    # still registered then would, on its way out, unregister a stranger's.
                    self._parked.cancel()
                    await self._left.wait()
            finally:
                self._socket.close()
            # A limiter of its own: the default one's threads may all be waiting for a collective.
            limiter = anyio.CapacityLimiter(1)
            await anyio.to_thread.run_sync(self._context.term, abandon_on_cancel=True, limiter=limiter)


class Router(_Channel):
    """The controller's ROUTER: hears every peer, answers one. `address` is the one really bound.

    A peer that connects under an identity already in use takes it over, so a restarted node is heard at once; two
    live peers that share one would take it from each other for ever, so put the incarnation into it.
    """

    @classmethod
    @asynccontextmanager
    async def open(cls, bind: str) -> AsyncIterator[Self]:
        """A bound ROUTER at `tcp://host:port` (port 0: the OS picks) or `ipc:///path`.

        Leaving the block, cancelled or not, takes at most the linger of 0.5 s (1.5 s on a starved machine) and
        raises ChannelClosed in a receiver still waiting.

        Raises:
            InvalidAddress: `bind` has a bad syntax or is no address of this machine.
            AddressInUse: another process listens there.
        """
        channel = cls(zmq.ROUTER, bind)
        try:
            channel._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            channel._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            await channel._bind(bind)
            yield channel
        finally:
            await channel._close()

    async def receive(self) -> tuple[bytes, bytes]:
        """The next message, as (identity of the peer, body). Cancelling is safe: no message is lost.

        Raises:
            ChannelClosed: the block of `open` was left.
            anyio.BusyResourceError: another task is receiving already.
        """
        peer, body = await self._receive(2)
        return peer, body

    def send_nowait(self, peer: bytes, body: bytes) -> None:
        """Queues a body for one peer; never blocks, and does not tell whether it arrives.

        Raises:
            PeerGone: the peer is not connected, or HIGH_WATER_MARK messages wait for it.
            TransportError: the body is over MAX_FRAME_BYTES.
            ChannelClosed: the block of `open` was left.
        """
        try:
            self._send(peer, body)
        except zmq.Again:
            raise PeerGone(_shown(peer), f"does not read: {HIGH_WATER_MARK} messages wait for it") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(_shown(peer)) from None


class Dealer(_Channel):
    """A peer's DEALER: its line to the controller; reconnects by itself, and keeps unsent messages meanwhile."""

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, identity: bytes) -> AsyncIterator[Self]:
        """A DEALER that connects to a Router's address; whether anybody is there shows only in an answer.

        Leaving the block, cancelled or not, takes at most the linger of 0.5 s (1.5 s on a starved machine) and
        raises ChannelClosed in a receiver still waiting.

        Raises:
            InvalidAddress: `address` has a bad syntax, an unknown host, or is a wildcard.
            InvalidInput: `identity` is not 1 to 255 bytes, or starts with a zero byte.
        """
        if not 1 <= len(identity) <= 255 or identity.startswith(b"\0"):
            raise InvalidInput(f"identity {identity!r} must be 1 to 255 bytes and not start with a zero byte")
        channel = cls(zmq.DEALER, address)
        try:
            channel._socket.setsockopt(zmq.ROUTING_ID, identity)
            await channel._connect()
            yield channel
        finally:
            await channel._close()

    async def receive(self) -> bytes:
        """The next body from the controller. Cancelling is safe: no message is lost.

        Raises:
            ChannelClosed: the block of `open` was left.
            anyio.BusyResourceError: another task is receiving already.
        """
        (body,) = await self._receive(1)
        return body

    def send_nowait(self, body: bytes) -> None:
        """Queues a body for the controller, connected or not; never blocks.

        Raises:
            PeerGone: HIGH_WATER_MARK messages wait for it already.
            TransportError: the body is over MAX_FRAME_BYTES.
            ChannelClosed: the block of `open` was left.
        """
        try:
            self._send(body)
        except zmq.Again:
            raise PeerGone(self.address, f"does not read: {HIGH_WATER_MARK} messages wait for it") from None


class Publisher(_Channel):
    """The controller's XPUB: says everything to every Subscriber. `address` is the one really bound.

    A hint, not a promise (ZeroMQ guide, chapter 5): who subscribes late or reads too slowly misses messages.
    """

    overflowed: int = 0
    """How often a subscriber's queue ran full; from then until it reads again, that subscriber misses everything."""

    @classmethod
    @asynccontextmanager
    async def open(cls, bind: str) -> AsyncIterator[Self]:
        """A bound XPUB at `tcp://host:port` (port 0: the OS picks) or `ipc:///path`.

        Leaving the block, cancelled or not, takes at most the linger of 0.5 s (1.5 s on a starved machine).

        Raises:
            InvalidAddress: `bind` has a bad syntax or is no address of this machine.
            AddressInUse: another process listens there.
        """
        channel = cls(zmq.XPUB, bind)
        try:
            channel._socket.setsockopt(zmq.XPUB_NODROP, 1)
            await channel._bind(bind)
            yield channel
        finally:
            await channel._close()

    def send_nowait(self, body: bytes) -> None:
        """Queues a body for every subscriber; never blocks. One whose queue is full misses it, the others do not.

        Raises:
            TransportError: the body is over MAX_FRAME_BYTES.
            ChannelClosed: the block of `open` was left.
        """
        try:
            self._send(body)
        except zmq.Again:
            self.overflowed += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._send(body)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._drain()

    def _drain(self) -> None:
        """Throws away what subscribers sent up: libzmq would keep it for a reader, without bound."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 1 or frames[0] not in _SUBSCRIPTIONS:
                self.dropped += 1


class Subscriber(_Channel):
    """A peer's SUB: hears everything a Publisher says from the moment the subscription reached it."""

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str) -> AsyncIterator[Self]:
        """A SUB that connects to a Publisher's address; it reconnects and subscribes again by itself.

        Leaving the block, cancelled or not, is immediate (1.5 s at most on a starved machine) and raises
        ChannelClosed in a receiver still waiting.

        Raises:
            InvalidAddress: `address` has a bad syntax, an unknown host, or is a wildcard.
        """
        channel = cls(zmq.SUB, address)
        try:
            channel._socket.setsockopt(zmq.SUBSCRIBE, b"")
            await channel._connect()
            yield channel
        finally:
            await channel._close()

    async def receive(self) -> bytes:
        """The next body published. Cancelling is safe: no message is lost.

        Raises:
            ChannelClosed: the block of `open` was left.
            anyio.BusyResourceError: another task is receiving already.
        """
        (body,) = await self._receive(1)
        return body


def _refuse(address: str, error: zmq.ZMQError) -> NoReturn:
    refusal: BusError
    if error.errno == zmq.EADDRINUSE:
        refusal = AddressInUse(address)
    else:
        number = error.errno or errno.EINVAL
        refusal = InvalidAddress(address, _PROBLEMS.get(number, os.strerror(number)))
    raise refusal from error


def _shown(peer: bytes) -> str:
    return peer.decode(errors="backslashreplace")
