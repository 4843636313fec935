"""A trainer on the bus: runs a `Source` over a `Connection` and a `Collective`, on the publisher's own event loop.

It holds the bytes of the head, for nodes that join late, and of the version on its way; nothing else is kept.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import anyio
from anyio.abc import TaskGroup

from bus import errors
from bus.client import Connection, Joined, new_peer
from bus.collective import AdapterBuffer, Collective, RendezvousStore
from bus.controller import Controller
from bus.errors import UpdateFailed
from bus.events import (
    Attempt,
    Event,
    LayoutDeclared,
    NodeOutcome,
    NodeStatus,
    Phase,
    PhaseTimes,
    Policy,
    PublishRefused,
    PublishRequested,
    Reason,
    Role,
    Served,
    StatusReported,
    StatusRequested,
    TransferFailed,
    UpdateAborted,
    UpdateCompleted,
    ViewProposed,
)
from bus.group_member import GroupMember
from bus.manifest import AdapterLayout, AdapterManifest
from bus.participant import Source
from bus.protocol import Answer, Discard, Effect, JoinGroup, LeaveGroup, Resolve, Timeouts, Transmit
from bus.tasks import Lane, background_tasks
from bus.transport import local_host_towards

logger = logging.getLogger(__name__)

STATUS_INTERVAL = 0.2
"""Seconds between two looks at the fleet while waiting for nodes."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One version's bytes, packed and hashed, ready to be sent."""

    layout: AdapterLayout
    manifest: AdapterManifest
    buffer: AdapterBuffer


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a version is to be delivered; see `PublishRequested`. `timeout` is in seconds."""

    timeout: float
    policy: Policy
    quorum: int
    supersede: bool


@dataclass(frozen=True, slots=True)
class Update:
    """A committed version: every live node serves it, but for those that `nodes` says were lost or late.

    `phases` and `seconds` are in seconds, `nbytes` in bytes; `attempts` above one means that a group broke on
    the way and the version went through in another view.
    """

    adapter: str
    version: int
    digest: str
    nbytes: int
    tensors: int
    phases: PhaseTimes
    nodes: tuple[NodeOutcome, ...]
    attempts: int
    seconds: float


@dataclass(slots=True)
class _Pending:
    """A publish that waits for its end."""

    request: PublishRequested
    payload: Payload
    ended: anyio.Event
    end: Event | None = None


class Session:
    """One trainer's stay on the bus; opened with `Session.open`. All methods belong to its event loop."""

    def __init__(
        self,
        adapter: str,
        connection: Connection,
        collective: Collective,
        release: Callable[[AdapterBuffer], None],
        tasks: TaskGroup,
    ) -> None:
        self.adapter = adapter
        self.address = connection.address
        self.nodes: tuple[NodeStatus, ...] = ()
        """The live rollout nodes, as the controller last told."""
        self._connection = connection
        self._collective = collective
        self._source = Source(connection.peer)
        self._groups = GroupMember(
            connection.peer, tasks, join=self._join_view, leave=collective.leave, report=self._handle
        )
        self._transfers = Lane(tasks)
        self._release = release
        self._head: tuple[Served, Payload] | None = None
        self._pending: dict[str, _Pending] = {}
        self._told = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        adapter: str,
        *,
        bind: str | None,
        address: str | None,
        journal: Path | str,
        node: str | None,
        device: str,
        backend: str | None,
        timeouts: Timeouts,
        join_timeout: float,
        release: Callable[[AdapterBuffer], None],
    ) -> AsyncIterator[Self]:
        """Join the controller at `address`, or run one at `bind` in this process, as the trainer of `adapter`.

        `release` is given each payload's buffer once nothing needs it any more.
        """
        async with AsyncExitStack() as stack:
            if bind is not None:
                controller = await stack.enter_async_context(Controller.open(bind, journal=journal, timeouts=timeouts))
                address = controller.address
            assert address is not None
            host = local_host_towards(address)
            store = RendezvousStore(host)
            stack.callback(store.close)
            collective = Collective(device, backend, host)
            stack.push_async_callback(collective.aclose)
            session: Self | None = None
            connection = await stack.enter_async_context(
                Connection.open(
                    address,
                    new_peer(node or "trainer"),
                    Role.TRAINER,
                    adapters=(adapter,),
                    store=store.address,
                    served=lambda: session._served() if session is not None else (),
                    timeout=join_timeout,
                    taken_patience=timeouts.lease + timeouts.heartbeat,
                )
            )
            tasks = await stack.enter_async_context(background_tasks())
            session = cls(adapter, connection, collective, release, tasks)
            tasks.start_soon(session._follow)
            await connection.wait_following()
            try:
                yield session
            finally:
                session._end_pending()

    # --------------------------------------------------------------------------------------- requests

    async def publish(self, payload: Payload, delivery: Delivery) -> Update:
        """Bring a payload to every live node; raises `UpdateFailed`. Cancelling stops the waiting only."""
        request = PublishRequested(
            self._connection.peer,
            secrets.token_hex(8),
            self.adapter,
            payload.manifest,
            delivery.timeout,
            delivery.policy,
            delivery.quorum,
            delivery.supersede,
        )
        started = anyio.current_time()
        self._pending[request.request] = pending = _Pending(request, payload, anyio.Event())
        try:
            self._request(pending)
            # The controller's own deadline comes first, and knows who is to blame.
            with anyio.move_on_after(delivery.timeout + self._connection.lease):
                await pending.ended.wait()
        finally:
            del self._pending[request.request]
            if pending.end is None:
                self._transfers.interrupt()
            if self._head is None or self._head[1] is not payload:
                self._release(payload.buffer)
        return self._result(pending, anyio.current_time() - started)

    async def wait_for_nodes(self, count: int, timeout: float) -> tuple[NodeStatus, ...]:
        """Wait until `count` rollout nodes follow the adapter; raises `TimeoutError` that says how many do."""
        with anyio.move_on_after(timeout):
            while len(await self.status()) < count:  # noqa: ASYNC110 - the controller tells only when asked
                await anyio.sleep(STATUS_INTERVAL)
            return self.nodes
        names = ", ".join(node.peer.node for node in self.nodes) or "none"
        raise TimeoutError(f"{len(self.nodes)} of {count} rollout nodes came within {timeout:g} s: {names}")

    async def status(self) -> tuple[NodeStatus, ...]:
        """The live rollout nodes that follow the adapter, asked for now."""
        self._told = anyio.Event()
        self._connection.send(StatusRequested(self._connection.peer))
        with anyio.move_on_after(self._connection.lease):
            await self._told.wait()
        return self.nodes

    # ---------------------------------------------------------------------------------------- events

    async def _follow(self) -> None:
        while True:
            event = await self._connection.receive()
            match event:
                case Joined():
                    self._perform(self._source.reset())
                    for pending in self._pending.values():
                        self._request(pending)
                case StatusReported():
                    self.nodes = tuple(
                        node
                        for node in event.nodes
                        if node.role is Role.ROLLOUT and node.following and node.wants(self.adapter)
                    )
                    self._told.set()
                case _:
                    self._handle(event)

    def _handle(self, event: Event) -> None:
        self._perform(self._source.handle(event))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(event):
                    self._connection.send(event)
                case JoinGroup() | LeaveGroup():
                    self._groups.perform(effect)
                case Transmit():
                    self._transfers.add(partial(self._transmit, effect))
                case Discard():
                    self._transfers.interrupt()
                case Resolve(request, event):
                    self._resolve(request, event)

    def _request(self, pending: _Pending) -> None:
        layout = pending.payload.layout
        self._connection.send(LayoutDeclared(layout.digest, layout.body))
        self._connection.send(pending.request)

    def _resolve(self, request: str, event: Event) -> None:
        pending = self._pending.get(request)
        if pending is None or pending.end is not None:
            return
        if isinstance(event, UpdateCompleted):
            former = self._head
            self._head = (Served(event.attempt.adapter, event.attempt.version, event.digest), pending.payload)
            if former is not None:
                self._release(former[1].buffer)
        pending.end = event
        pending.ended.set()

    def _end_pending(self) -> None:
        """Whoever still waits for a publish hears that nobody will tell how it ended."""
        peer = self._connection.peer
        for request in tuple(self._pending):
            detail = "the publisher was closed before the update ended"
            self._resolve(request, PublishRefused(peer, request, self.adapter, peer.node, Reason.SOURCE_LOST, detail))

    def _served(self) -> tuple[Served, ...]:
        """The versions whose bytes this trainer can send to a node that lacks them."""
        return (self._head[0],) if self._head is not None else ()

    # ------------------------------------------------------------------------------------- data plane

    async def _join_view(self, proposal: ViewProposed) -> None:
        await self._collective.join(
            proposal.view, rank=0, size=len(proposal.members), store=proposal.store, timeout=proposal.timeout
        )

    async def _transmit(self, effect: Transmit) -> None:
        attempt = effect.started.attempt
        payload = self._payload(effect.update.manifest.digest)
        if payload is None:
            self._report_failed(attempt, "the trainer no longer holds these bytes")
            return
        ranks = [rank for node in effect.started.audience for rank in effect.proposal.ranks(node)]
        try:
            await self._collective.transfer(
                attempt.view, payload.buffer, payload.manifest, audience=ranks, timeout=effect.started.timeout
            )
        except errors.TransferFailed as error:
            self._report_failed(attempt, error.problem)

    def _payload(self, digest: str) -> Payload | None:
        held = [pending.payload for pending in self._pending.values()]
        held += [self._head[1]] if self._head is not None else []
        return next((payload for payload in held if payload.manifest.digest == digest), None)

    def _report_failed(self, attempt: Attempt, problem: str) -> None:
        self._handle(TransferFailed(attempt, self._connection.peer, problem))

    def _result(self, pending: _Pending, seconds: float) -> Update:
        manifest = pending.payload.manifest
        match pending.end:
            case UpdateCompleted() as end:
                return Update(
                    self.adapter,
                    end.attempt.version,
                    end.digest,
                    manifest.nbytes,
                    manifest.tensors,
                    end.phases,
                    end.outcomes,
                    end.attempt.number,
                    seconds,
                )
            case UpdateAborted() as end:
                version, node, phase, reason, detail = (
                    end.attempt.version,
                    end.node,
                    end.phase,
                    end.reason,
                    end.detail,
                )
            case PublishRefused() as end:
                version, node, phase, reason, detail = 0, end.node, Phase.READY, end.reason, end.detail
            case _:
                version, node, phase, reason = 0, "", Phase.QUEUE, Reason.DEADLINE_PASSED
                detail = f"the controller at {self.address} did not answer"
        raise UpdateFailed(self.adapter, version, node=node, phase=phase, reason=reason, detail=detail, seconds=seconds)
