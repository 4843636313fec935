"""A rollout node on the bus: runs a `Participant` over a `Connection` and an `Engine`.

It decides nothing: it performs what the participant asks, each step with a deadline, and reports the outcome.
The steps of one adapter happen one after another; different adapters do not wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from bus import errors
from bus.client import Connection, Joined, new_peer
from bus.engine import Engine
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    LoadFailed,
    NodeReady,
    NodeRefused,
    Reason,
    Role,
    TransferFailed,
    TransferStarted,
    VersionActivated,
    VersionRetired,
)
from bus.group_member import GroupMember
from bus.participant import Participant
from bus.protocol import (
    Activate,
    Answer,
    Discard,
    Effect,
    JoinGroup,
    LeaveGroup,
    Load,
    Prepare,
    Receive,
    Timeouts,
)
from bus.tasks import Lane, background_tasks

logger = logging.getLogger(__name__)


async def follow(
    engine: Engine,
    *,
    address: str,
    node: str | None = None,
    adapters: tuple[str, ...] = (),
    timeouts: Timeouts | None = None,
) -> None:
    """Serve what the controller at `address` commits, for ever; the engine goes on serving when this ends.

    `adapters` names those to follow (none: all). Waits for a controller that is not there yet, and joins again
    by itself. Raises `JoinFailed` when the controller will not have this node. Cancelling leaves the bus.
    """
    peer = new_peer(node)
    participant = Participant(peer, adapters, timeouts)
    connecting = Connection.open(
        address,
        peer,
        Role.ROLLOUT,
        adapters=adapters,
        capabilities=engine.capabilities,
        served=lambda: participant.served.values(),
    )
    async with connecting as connection, background_tasks() as tasks:
        await _Follower(engine, participant, connection, tasks).run()


class _Follower:
    def __init__(self, engine: Engine, participant: Participant, connection: Connection, tasks: TaskGroup) -> None:
        self._engine = engine
        self._participant = participant
        self._connection = connection
        self._tasks = tasks
        self._adapters: dict[str, Lane] = {}
        self._groups = GroupMember(
            participant.peer,
            tasks,
            join=lambda proposal: engine.join_view(proposal, participant.peer.node),
            leave=engine.leave_view,
            report=self._handle,
        )
        self._moved = anyio.Event()

    async def run(self) -> None:
        self._tasks.start_soon(self._keep_time)
        self._tasks.start_soon(self._report_retired)
        try:
            while True:
                event = await self._connection.receive()
                if isinstance(event, Joined):
                    logger.info("%s joined the controller at %s", self._participant.peer, self._connection.address)
                    self._perform(self._participant.reset())
                else:
                    self._handle(event)
        finally:
            await self._groups.leave_all()

    def _handle(self, event: Event) -> None:
        self._perform(self._participant.handle(event, anyio.current_time()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(event):
                    self._connection.send(event)
                case JoinGroup() | LeaveGroup():
                    self._groups.perform(effect)
                case Prepare(update, layout):
                    step = partial(self._engine.prepare, update, layout)
                    self._lane(update.attempt).add(partial(self._prepare, update.attempt, step, update.timeout))
                case Receive(started):
                    self._lane(started.attempt).add(partial(self._receive, started))
                case Load(attempt):
                    self._lane(attempt).add(partial(self._load, attempt))
                case Activate(attempt, digest):
                    self._lane(attempt).add(partial(self._activate, attempt, digest))
                case Discard(attempt):
                    self._lane(attempt).interrupt()
                    self._lane(attempt).add(partial(self._discard, attempt))
        self._moved.set()

    def _lane(self, attempt: Attempt) -> Lane:
        if attempt.adapter not in self._adapters:
            self._adapters[attempt.adapter] = Lane(self._tasks)
        return self._adapters[attempt.adapter]

    async def _keep_time(self) -> None:
        while True:
            self._moved = anyio.Event()
            deadline = self._participant.next_deadline()
            with anyio.CancelScope(deadline=float("inf") if deadline is None else deadline):
                await self._moved.wait()
            self._perform(self._participant.handle_time(anyio.current_time()))

    async def _report_retired(self) -> None:
        while True:
            adapter, version = await self._engine.wait_retired()
            self._connection.send(VersionRetired(adapter, version, self._participant.peer))

    async def _prepare(self, attempt: Attempt, step: Callable[[], Awaitable[None]], timeout: float) -> None:
        peer = self._participant.peer
        try:
            with anyio.fail_after(timeout):
                await step()
        except errors.Refused as error:
            self._handle(NodeRefused(attempt, peer, Reason(error.reason), error.detail))
        except Exception as error:
            self._handle(NodeRefused(attempt, peer, Reason.ENGINE_FAILED, _told("preparing", error)))
        else:
            self._handle(NodeReady(attempt, peer))

    async def _receive(self, started: TransferStarted) -> None:
        attempt, peer = started.attempt, self._participant.peer
        try:
            with anyio.fail_after(started.timeout):
                received = await self._engine.receive(started)
        except errors.TransferFailed as error:
            self._handle(TransferFailed(attempt, peer, error.problem))
        except Exception as error:
            self._handle(TransferFailed(attempt, peer, _told("receiving", error)))
        else:
            self._handle(AdapterReceived(attempt, peer, received.digest, received.seconds))

    async def _load(self, attempt: Attempt) -> None:
        peer = self._participant.peer
        try:
            with anyio.fail_after(self._participant.timeouts.load):
                loaded = await self._engine.load(attempt)
        except errors.LoadFailed as error:
            self._handle(LoadFailed(attempt, peer, Reason(error.reason), error.detail))
        except Exception as error:
            self._handle(LoadFailed(attempt, peer, Reason.ENGINE_FAILED, _told("loading", error)))
        else:
            proof = (loaded.digest, loaded.matched, loaded.total, loaded.seconds)
            self._handle(AdapterLoaded(attempt, peer, *proof))

    async def _activate(self, attempt: Attempt, digest: str) -> None:
        # An activation is one store in a table; one that fails leaves the version loaded, and the controller
        # brings the node to the head again.
        if await _quietly(partial(self._engine.activate, attempt), "activating", self._participant.timeouts.activate):
            self._handle(VersionActivated(attempt, self._participant.peer, digest))

    async def _discard(self, attempt: Attempt) -> None:
        await _quietly(partial(self._engine.discard, attempt), "discarding", self._participant.timeouts.load)


async def _quietly(step: Callable[[], Awaitable[None]], doing: str, timeout: float) -> bool:
    """Whether a step that nobody waits for ended well; if not, the log says why."""
    try:
        with anyio.fail_after(timeout):
            await step()
    except Exception as error:
        _told(doing, error)
        return False
    return True


def _told(doing: str, error: Exception) -> str:
    """An unforeseen failure in one sentence, with its traceback in the log."""
    logger.error("%s failed", doing, exc_info=error)
    if isinstance(error, TimeoutError):
        return f"{doing} took too long"
    return f"{doing} failed: {type(error).__name__}: {error}"
