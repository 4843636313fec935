"""The life cycles of the bus, one table each, and the effects that the pure core asks its shells to perform.

Everything that decides where an update or a view goes next stands in this file. A table maps a state to the
signals it accepts and the state each leads to; a signal is an event, or one of the conclusions below that the
core draws from events (`EveryoneReady`). A signal missing from a state's row does not move it: from the wire
that is a stale answer, dropped and counted.

    queued ─ announced ─ transferring ─ loading ─ committed ─ completed
       ▲         │            │            │
       └─────────┴── retry ───┴────────────┘        any of these ─ aborted

No I/O, no clock, no randomness here: time is an argument, in seconds on any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from bus.errors import ProtocolError
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    LayoutDeclared,
    LoadFailed,
    NodeLost,
    NodeReady,
    NodeRefused,
    Peer,
    Phase,
    TransferFailed,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    VersionActivated,
    VersionCommitted,
    ViewFailed,
    ViewFormed,
    ViewJoined,
    ViewProposed,
)
from bus.manifest import AdapterLayout

# ------------------------------------------------------------------------------------ conclusions


class Conclusion:
    """What the core concludes from events and time; never on the wire."""


class EveryoneReady(Conclusion): ...


class EveryoneReceived(Conclusion): ...


class EveryoneLoaded(Conclusion): ...


class EveryoneActivated(Conclusion): ...


class DeadlinePassed(Conclusion): ...


class ViewBroken(Conclusion):
    """The group cannot carry this attempt to its end; another view can."""


class AttemptsExhausted(Conclusion): ...


class SourceLost(Conclusion): ...


class NodeLeftOut(Conclusion):
    """Under the quorum policy, an update goes on without this node."""


class MembershipChanged(Conclusion): ...


Signal: TypeAlias = type[Event] | type[Conclusion]

# ------------------------------------------------------------------------------------------ tables


class UpdateState(StrEnum):
    QUEUED = "queued"
    ANNOUNCED = "announced"
    TRANSFERRING = "transferring"
    LOADING = "loading"
    COMMITTED = "committed"
    COMPLETED = "completed"
    ABORTED = "aborted"


UPDATE: Final[Mapping[UpdateState, Mapping[Signal, UpdateState]]] = {
    UpdateState.QUEUED: {
        UpdateAnnounced: UpdateState.ANNOUNCED,
        AttemptsExhausted: UpdateState.ABORTED,
        DeadlinePassed: UpdateState.ABORTED,
        SourceLost: UpdateState.ABORTED,
    },
    UpdateState.ANNOUNCED: {
        NodeLeftOut: UpdateState.ANNOUNCED,
        NodeReady: UpdateState.ANNOUNCED,
        EveryoneReady: UpdateState.TRANSFERRING,
        ViewBroken: UpdateState.QUEUED,
        NodeLost: UpdateState.QUEUED,
        NodeRefused: UpdateState.ABORTED,
        DeadlinePassed: UpdateState.ABORTED,
        SourceLost: UpdateState.ABORTED,
    },
    UpdateState.TRANSFERRING: {
        NodeLeftOut: UpdateState.TRANSFERRING,
        AdapterReceived: UpdateState.TRANSFERRING,
        AdapterLoaded: UpdateState.TRANSFERRING,
        EveryoneReceived: UpdateState.LOADING,
        ViewBroken: UpdateState.QUEUED,
        NodeLost: UpdateState.QUEUED,
        LoadFailed: UpdateState.ABORTED,
        DeadlinePassed: UpdateState.ABORTED,
        SourceLost: UpdateState.ABORTED,
    },
    UpdateState.LOADING: {
        NodeLeftOut: UpdateState.LOADING,
        AdapterLoaded: UpdateState.LOADING,
        EveryoneLoaded: UpdateState.COMMITTED,
        NodeLost: UpdateState.QUEUED,
        LoadFailed: UpdateState.ABORTED,
        DeadlinePassed: UpdateState.ABORTED,
        SourceLost: UpdateState.ABORTED,
    },
    UpdateState.COMMITTED: {
        VersionActivated: UpdateState.COMMITTED,
        NodeLost: UpdateState.COMMITTED,
        EveryoneActivated: UpdateState.COMPLETED,
        DeadlinePassed: UpdateState.COMPLETED,
    },
    UpdateState.COMPLETED: {},
    UpdateState.ABORTED: {},
}
"""The life of an update, as the controller sees it."""

PHASES: Final[Mapping[UpdateState, Phase]] = {
    UpdateState.QUEUED: Phase.QUEUE,
    UpdateState.ANNOUNCED: Phase.READY,
    UpdateState.TRANSFERRING: Phase.TRANSFER,
    UpdateState.LOADING: Phase.LOAD,
    UpdateState.COMMITTED: Phase.COMMIT,
    UpdateState.COMPLETED: Phase.COMMIT,
}
"""The phase that a failure in each state is reported under."""


class ViewState(StrEnum):
    PROPOSED = "proposed"
    FORMED = "formed"
    ABANDONED = "abandoned"


VIEW: Final[Mapping[ViewState, Mapping[Signal, ViewState]]] = {
    ViewState.PROPOSED: {
        ViewJoined: ViewState.PROPOSED,
        ViewFormed: ViewState.FORMED,
        ViewFailed: ViewState.ABANDONED,
        NodeLost: ViewState.ABANDONED,
        DeadlinePassed: ViewState.ABANDONED,
    },
    ViewState.FORMED: {
        ViewBroken: ViewState.ABANDONED,
        NodeLost: ViewState.ABANDONED,
        MembershipChanged: ViewState.ABANDONED,
    },
    ViewState.ABANDONED: {},
}
"""The life of a view: the group of one source and the workers that follow it."""


class ReplicaState(StrEnum):
    WAITING_FOR_LAYOUT = "waiting for layout"
    PREPARING = "preparing"
    READY = "ready"
    RECEIVING = "receiving"
    LOADING = "loading"
    LOADED = "loaded"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DROPPED = "dropped"


REPLICA: Final[Mapping[ReplicaState, Mapping[Signal, ReplicaState]]] = {
    ReplicaState.WAITING_FOR_LAYOUT: {
        NodeLeftOut: ReplicaState.DROPPED,
        LayoutDeclared: ReplicaState.PREPARING,
        NodeRefused: ReplicaState.DROPPED,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.PREPARING: {
        NodeLeftOut: ReplicaState.DROPPED,
        NodeReady: ReplicaState.READY,
        NodeRefused: ReplicaState.DROPPED,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.READY: {
        TransferStarted: ReplicaState.RECEIVING,
        NodeRefused: ReplicaState.DROPPED,
        NodeLeftOut: ReplicaState.DROPPED,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.RECEIVING: {
        AdapterReceived: ReplicaState.LOADING,
        TransferFailed: ReplicaState.DROPPED,
        LoadFailed: ReplicaState.DROPPED,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.LOADING: {
        AdapterLoaded: ReplicaState.LOADED,
        LoadFailed: ReplicaState.DROPPED,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.LOADED: {
        VersionCommitted: ReplicaState.ACTIVATING,
        UpdateAborted: ReplicaState.DROPPED,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.ACTIVATING: {
        VersionActivated: ReplicaState.ACTIVE,
        DeadlinePassed: ReplicaState.DROPPED,
    },
    ReplicaState.ACTIVE: {},
    ReplicaState.DROPPED: {},
}
"""The life of one attempt on one rollout node."""


S = TypeVar("S", bound=StrEnum)


def next_state(table: Mapping[S, Mapping[Signal, S]], state: S, signal: Signal) -> S:
    """Where `signal` leads from `state`; raises `ProtocolError` if the table has no such step."""
    try:
        return table[state][signal]
    except KeyError:
        raise ProtocolError(f"{signal.__name__} is not accepted while {state}") from None


# ----------------------------------------------------------------------------------------- effects


class Effect:
    """Something the core asks its shell to do; the outcome comes back as an event."""


@dataclass(frozen=True, slots=True)
class Publish(Effect):
    """Journal the event, then publish it to every peer."""

    event: Event


@dataclass(frozen=True, slots=True)
class Record(Effect):
    """Journal the event; it is nobody else's business."""

    event: Event


@dataclass(frozen=True, slots=True)
class Send(Effect):
    """Send the event to one peer, unjournaled."""

    peer: Peer
    event: Event


@dataclass(frozen=True, slots=True)
class Answer(Effect):
    """Send the event to the controller."""

    event: Event


@dataclass(frozen=True, slots=True)
class JoinGroup(Effect):
    proposal: ViewProposed


@dataclass(frozen=True, slots=True)
class LeaveGroup(Effect):
    view: int


@dataclass(frozen=True, slots=True)
class Prepare(Effect):
    update: UpdateAnnounced
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class Receive(Effect):
    started: TransferStarted


@dataclass(frozen=True, slots=True)
class Load(Effect):
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Activate(Effect):
    attempt: Attempt
    digest: str


@dataclass(frozen=True, slots=True)
class Discard(Effect):
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Transmit(Effect):
    """The source's part of a transfer: send the payload named by `digest` to the ranks of the audience."""

    started: TransferStarted
    update: UpdateAnnounced
    proposal: ViewProposed


@dataclass(frozen=True, slots=True)
class Resolve(Effect):
    """A publish is over: `event` is its `UpdateCompleted`, its final `UpdateAborted` or its `PublishRefused`."""

    request: str
    event: Event


# ---------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every wait of the protocol, in seconds; each nests in the next: event < ack < transfer < publish."""

    heartbeat: float = 0.5
    lease: float = 3.0
    view: float = 10.0
    ready: float = 10.0
    transfer: float = 5.0
    floor_rate: float = 50e6
    """The slowest wire we wait for, in bytes a second; a transfer may take `transfer` plus its bytes at this rate."""
    load: float = 30.0
    activate: float = 5.0
    publish: float = 60.0
    attempts: int = 3
    """How often a publish is tried when its group breaks and nobody is found dead."""
    losses: int = 3
    """How often a node may be lost within `loss_window` before it is quarantined."""
    loss_window: float = 60.0
    quarantine: float = 10.0
    """The first quarantine; each further one is twice as long, up to `quarantine_limit`."""
    quarantine_limit: float = 300.0

    def transfer_of(self, nbytes: int) -> float:
        return self.transfer + nbytes / self.floor_rate
