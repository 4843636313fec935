"""Every fact that travels on the bus or stands in the journal: frozen dataclasses, past tense.

An event says what happened, never what to do. Field types are the codec's contract: int, float, bool, str,
bytes, a `StrEnum`, a dataclass from here or from `manifest`, a tuple of these, or one of them or None.
Durations are in seconds and sizes in bytes; hosts share no clock, so no event carries a point in time.

To add a field, give it a default at the end of its class: peers of an older release still read the event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from bus.manifest import AdapterManifest, BaseModel

# ---------------------------------------------------------------------------------------------- words


class Role(StrEnum):
    """What a peer is on the bus for."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    OBSERVER = "observer"


class Phase(StrEnum):
    """Where in its life an update is; a failure names the phase it happened in."""

    QUEUE = "queue"
    READY = "ready"
    TRANSFER = "transfer"
    LOAD = "load"
    COMMIT = "commit"


class Reason(StrEnum):
    """Why something was refused or failed; a machine can act on it, `detail` tells a person."""

    RANK_TOO_HIGH = "rank_too_high"
    UNKNOWN_MODULES = "unknown_modules"
    WRONG_BASE_MODEL = "wrong_base_model"
    UNSUPPORTED_ADAPTER = "unsupported_adapter"
    NO_FREE_SLOT = "no_free_slot"
    TOO_LARGE = "too_large"
    LAYOUT_UNKNOWN = "layout_unknown"
    NOT_IN_VIEW = "not_in_view"
    OUTDATED = "outdated"
    DIGEST_MISMATCH = "digest_mismatch"
    MODULES_UNMATCHED = "modules_unmatched"
    ENGINE_FAILED = "engine_failed"
    GROUP_BROKEN = "group_broken"
    DEADLINE_PASSED = "deadline_passed"
    NODE_LOST = "node_lost"
    SOURCE_LOST = "source_lost"
    NO_NODES = "no_nodes"
    NAME_TAKEN = "name_taken"
    ADAPTER_TAKEN = "adapter_taken"
    NOT_ALLOWED = "not_allowed"
    SUPERSEDED = "superseded"
    QUEUE_FULL = "queue_full"
    CONTROLLER_RESTARTED = "controller_restarted"


class Policy(StrEnum):
    """What a node that says no, or nothing, does to an update.

    `strict`: the update fails. `quorum`: the node is left out and stale, as long as enough others confirm.
    """

    STRICT = "strict"
    QUORUM = "quorum"


class Outcome(StrEnum):
    """How an update ended for one node."""

    ACTIVATED = "activated"
    LOST = "lost"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """A process on the bus; the incarnation, random per start, tells it from its past."""

    node: str
    incarnation: str

    def __str__(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to deliver one version in one view; an answer for any other attempt is stale."""

    adapter: str
    version: int
    number: int
    view: int

    def __str__(self) -> str:
        return f"{self.adapter}@{self.version}"


@dataclass(frozen=True, slots=True)
class Served:
    """A version that a node answers with under the adapter's name, proven by its digest."""

    adapter: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a view: a worker process of a peer. The source is rank 0."""

    node: str
    worker: int


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """What a node can serve; travels when it joins.

    `modules` holds the last part of each module name that can take LoRA (`q_proj`), `device` torch's device
    type, `dtype` the serving dtype, `slots` how many versions can be live at once.
    """

    base_model: BaseModel
    max_rank: int
    slots: int
    modules: tuple[str, ...]
    dtype: str
    workers: int
    device: str
    engine: str
    engine_version: str
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long each phase of an update took, in seconds."""

    ready: float
    transfer: float
    load: float
    commit: float
    total: float


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What became of an update on one node: `phase` is the one it reached, times are its own, in seconds."""

    node: str
    outcome: Outcome
    phase: Phase
    detail: str = ""
    receive_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as the controller sees it.

    `following` says whether it hears what is published, and so takes part in updates; `silence` is the time since
    it was last heard, `quarantine` for how long it still stays out of views, both in seconds.
    """

    peer: Peer
    role: Role
    following: bool
    silence: float
    served: tuple[Served, ...]
    adapters: tuple[str, ...]
    capabilities: NodeCapabilities | None
    quarantine: float = 0.0

    def wants(self, adapter: str) -> bool:
        return wants(self.adapters, adapter)


@dataclass(frozen=True, slots=True)
class UpdateStatus:
    """The update in flight for one adapter, and whom it waits for."""

    attempt: Attempt
    phase: Phase
    seconds: float
    waiting_for: tuple[str, ...]


def wants(adapters: tuple[str, ...], adapter: str) -> bool:
    """Whether a node that names these adapters follows one: a node that names none follows all."""
    return not adapters or adapter in adapters


class Event:
    """The root of every event; the class name is the event's kind on the wire and in the journal."""

    __slots__ = ()


# -------------------------------------------------------------------------------------------- joining


@dataclass(frozen=True, slots=True)
class JoinRequested(Event):
    """A peer wants in. A trainer names its adapters and its rendezvous store, a rollout node what it can serve."""

    peer: Peer
    role: Role
    adapters: tuple[str, ...] = ()
    capabilities: NodeCapabilities | None = None
    store: str = ""
    served: tuple[Served, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinAccepted(Event):
    """The welcome: where events are published, how often to be heard, and what is current."""

    peer: Peer
    events: str
    heartbeat: float
    lease: float
    heads: tuple[Served, ...]


@dataclass(frozen=True, slots=True)
class JoinRefused(Event):
    peer: Peer
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class NodeAlive(Event):
    """A peer's heartbeat: the newest sequence it saw and what it serves."""

    peer: Peer
    sequence: int
    served: tuple[Served, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLeft(Event):
    """A peer went by its own will."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """A peer was not heard for a whole lease, or came back under another incarnation."""

    peer: Peer
    detail: str


@dataclass(frozen=True, slots=True)
class NodeQuarantined(Event):
    """A node was lost again and again; it stays out of views for so many seconds, whatever it says."""

    node: str
    losses: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerUnknown(Event):
    """The controller does not know this peer (it restarted, or the lease ended): the peer must join again."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ControllerStarted(Event):
    """A controller opened the journal; what was in flight before is over."""

    address: str


@dataclass(frozen=True, slots=True)
class ControllerAlive(Event):
    """The controller's heartbeat: the newest sequence and every head, so that a gap or a silence is noticed."""

    sequence: int
    heads: tuple[Served, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRequested(Event):
    """A peer saw a gap in the sequence and asks for what is current."""

    peer: Peer


# ---------------------------------------------------------------------------------------------- views


@dataclass(frozen=True, slots=True)
class ViewProposed(Event):
    """A group is to form: each member joins it as the rank of its place in `members`, rendezvous at `store`."""

    view: int
    source: str
    members: tuple[Member, ...]
    store: str
    timeout: float

    def ranks(self, node: str) -> tuple[int, ...]:
        """The ranks that a node's workers take, in the order of its workers."""
        return tuple(rank for rank, member in enumerate(self.members) if member.node == node)


@dataclass(frozen=True, slots=True)
class ViewJoined(Event):
    """All workers of a peer are in the group."""

    view: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class ViewFailed(Event):
    """A peer could not join the group; `missing` names the nodes it saw no trace of."""

    view: int
    peer: Peer
    missing: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class ViewFormed(Event):
    view: int
    source: str


@dataclass(frozen=True, slots=True)
class ViewAbandoned(Event):
    """A group that never formed, broke, or lost a member; nobody uses it again."""

    view: int
    source: str
    missing: tuple[str, ...]
    detail: str


# --------------------------------------------------------------------------------------------- updates


@dataclass(frozen=True, slots=True)
class LayoutDeclared(Event):
    """The canonical bytes of a layout: sent and journaled once, named by their digest."""

    digest: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LayoutRequested(Event):
    """A node was announced a layout that it does not hold."""

    peer: Peer
    digest: str


@dataclass(frozen=True, slots=True)
class PublishRequested(Event):
    """A trainer has a new version of its adapter; the controller gives it the next number.

    `quorum` is the number of nodes that must confirm under that policy (0: a majority). `supersede` drops
    whatever of the adapter still waits in the queue.
    """

    peer: Peer
    request: str
    adapter: str
    manifest: AdapterManifest
    timeout: float
    policy: Policy = Policy.STRICT
    quorum: int = 0
    supersede: bool = False


@dataclass(frozen=True, slots=True)
class PublishRefused(Event):
    """A publish that got no number; `node` is the one that could not serve it, if any."""

    peer: Peer
    request: str
    adapter: str
    node: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class UpdateAnnounced(Event):
    """A version is about to travel to `audience`, all in the attempt's view; `request` is the trainer's own mark.

    `catch_up` marks the head on its way to nodes that lack it, while the others serve on.
    """

    attempt: Attempt
    request: str
    source: str
    audience: tuple[str, ...]
    manifest: AdapterManifest
    timeout: float
    catch_up: bool = False


@dataclass(frozen=True, slots=True)
class NodeReady(Event):
    """A node can serve exactly this manifest, is in exactly this view, and holds the buffers."""

    attempt: Attempt
    peer: Peer


@dataclass(frozen=True, slots=True)
class NodeRefused(Event):
    attempt: Attempt
    peer: Peer
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class TransferStarted(Event):
    """Every node of the audience is ready: source and audience enter the collective."""

    attempt: Attempt
    audience: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class AdapterReceived(Event):
    """All workers of a node hold the bytes, and hashed them to this digest."""

    attempt: Attempt
    peer: Peer
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferFailed(Event):
    """A member's collective broke off; its group is of no more use."""

    attempt: Attempt
    peer: Peer
    detail: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded(Event):
    """The proof: bytes with the manifest's digest, `matched` of `total` tensors in their modules, slot filled."""

    attempt: Attempt
    peer: Peer
    digest: str
    matched: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    attempt: Attempt
    peer: Peer
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class VersionCommitted(Event):
    """The version is the head: from here on every node of the audience serves it."""

    attempt: Attempt
    digest: str


@dataclass(frozen=True, slots=True)
class VersionActivated(Event):
    """A node's new requests use the version."""

    attempt: Attempt
    peer: Peer
    digest: str


@dataclass(frozen=True, slots=True)
class VersionRetired(Event):
    """A node removed an old version: its last request has ended."""

    adapter: str
    version: int
    peer: Peer


@dataclass(frozen=True, slots=True)
class UpdateAborted(Event):
    """An attempt ended before its commit; `node` is the culprit, `final` says the number is burned."""

    attempt: Attempt
    phase: Phase
    node: str
    reason: Reason
    detail: str
    final: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class UpdateCompleted(Event):
    """An update is over: every live node of the audience serves it; the outcomes say who was lost or late."""

    attempt: Attempt
    request: str
    digest: str
    phases: PhaseTimes
    outcomes: tuple[NodeOutcome, ...]


# --------------------------------------------------------------------------------------------- status


@dataclass(frozen=True, slots=True)
class StatusRequested(Event):
    peer: Peer


@dataclass(frozen=True, slots=True)
class StatusReported(Event):
    """The controller's picture of the fleet."""

    sequence: int
    nodes: tuple[NodeStatus, ...]
    heads: tuple[Served, ...]
    updates: tuple[UpdateStatus, ...]
    completed: tuple[UpdateCompleted, ...]
    counters: tuple[tuple[str, int], ...]


EVENTS: Final[dict[str, type[Event]]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Every kind of event by its name on the wire."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """An event with its place on the bus.

    `run` is the controller run that said it, `sequence` its place in the journal (0: not journaled), and
    `previous` the sequence of the event published before it: a subscriber that saw another one missed some.
    """

    run: str
    sequence: int
    event: Any
    previous: int = 0
