"""What a peer does about the controller's events: pure. `Participant` for a rollout node, `Source` for a trainer.

Events go in, effects come out; the shell in `client.py` or in the publisher performs them and feeds the
outcome back as the event that tells of it (`NodeReady`, `TransferFailed`, …), which moves the replica on by the
`REPLICA` table and goes to the controller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from bus.errors import InvalidLayout, ProtocolError
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    LayoutDeclared,
    LayoutRequested,
    LoadFailed,
    NodeReady,
    NodeRefused,
    Peer,
    PublishRefused,
    Reason,
    Served,
    TransferFailed,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    UpdateCompleted,
    VersionActivated,
    VersionCommitted,
    ViewAbandoned,
    ViewFailed,
    ViewJoined,
    ViewProposed,
)
from bus.manifest import AdapterLayout
from bus.protocol import (
    REPLICA,
    Activate,
    Answer,
    DeadlinePassed,
    Discard,
    Effect,
    JoinGroup,
    LeaveGroup,
    Load,
    NodeLeftOut,
    Prepare,
    Receive,
    ReplicaState,
    Resolve,
    Signal,
    Timeouts,
    Transmit,
    next_state,
)

LAYOUTS_KEPT: Final = 8
"""How many layouts a node remembers; adapters change values every few seconds and layouts almost never."""


class Groups:
    """The views that one peer is in, and those it was told to join; at most one per source."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._proposals: dict[str, ViewProposed] = {}
        self._joined: set[int] = set()

    def proposal(self, view: int) -> ViewProposed | None:
        """The proposal of a view that this peer has joined."""
        found = next((p for p in self._proposals.values() if p.view == view), None)
        return found if found is not None and view in self._joined else None

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case ViewProposed(view=view, source=source):
                former = self._proposals.get(source)
                if former is not None and former.view >= view:
                    return []
                effects: list[Effect] = [LeaveGroup(former.view)] if former else []
                self._proposals.pop(source, None)
                if event.ranks(self._node):
                    self._proposals[source] = event
                    effects.append(JoinGroup(event))
                return effects
            case ViewAbandoned(view=view, source=source):
                former = self._proposals.get(source)
                if former is None or former.view > view:
                    return []
                del self._proposals[source]
                self._joined.discard(view)
                return [LeaveGroup(former.view)]
            case ViewJoined(view=view):
                if not any(proposal.view == view for proposal in self._proposals.values()):
                    return []
                self._joined.add(view)
                return [Answer(event)]
            case ViewFailed():
                return [Answer(event)]
        return []

    def leave_all(self) -> list[Effect]:
        effects: list[Effect] = [LeaveGroup(proposal.view) for proposal in self._proposals.values()]
        self._proposals.clear()
        self._joined.clear()
        return effects


@dataclass(slots=True, eq=False)
class Replica:
    """One attempt as one node lives it; `deadline` is when the node gives up on a controller that fell silent."""

    update: UpdateAnnounced
    deadline: float
    state: ReplicaState

    @property
    def attempt(self) -> Attempt:
        return self.update.attempt


class Participant:
    """A rollout node's mind. `served` is what it answers with now, by adapter."""

    def __init__(self, peer: Peer, adapters: tuple[str, ...] = (), timeouts: Timeouts | None = None) -> None:
        self.peer = peer
        self.adapters = adapters
        self.timeouts = timeouts or Timeouts()
        self.served: dict[str, Served] = {}
        self.counters: Counter[str] = Counter()
        self._groups = Groups(peer.node)
        self._layouts: OrderedDict[str, AdapterLayout] = OrderedDict()
        self._replicas: dict[str, Replica] = {}

    def __repr__(self) -> str:
        return f"<Participant {self.peer} serves {self.served}, replicas {self._replicas}>"

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about an event of the controller, or about the outcome of an effect."""
        match event:
            case ViewProposed() | ViewAbandoned() | ViewJoined() | ViewFailed():
                return self._groups.handle(event)
            case UpdateAnnounced():
                return self._on_announced(event, now)
            case LayoutDeclared():
                return self._on_layout(event)
            case TransferStarted():
                return self._on_transfer_started(event, now)
            case UpdateAborted(attempt=attempt):
                return self._drop(attempt, UpdateAborted)
            case VersionCommitted(attempt=attempt, digest=digest):
                replica = self._step(attempt, VersionCommitted)
                if replica is None:
                    return []
                replica.deadline = now + self.timeouts.activate + self.timeouts.lease
                return [Activate(attempt, digest)]
            case NodeReady(attempt=attempt):
                return [Answer(event)] if self._step(attempt, NodeReady) else []
            case AdapterReceived(attempt=attempt, digest=digest):
                return self._on_received(event, attempt, digest)
            case AdapterLoaded(attempt=attempt):
                return [Answer(event)] if self._step(attempt, AdapterLoaded) else []
            case NodeRefused(attempt=attempt) | TransferFailed(attempt=attempt) | LoadFailed(attempt=attempt):
                dropped = self._drop(attempt, type(event))
                return [*dropped, Answer(event)] if dropped else []
            case VersionActivated(attempt=attempt, digest=digest):
                # The engine serves it, and that is a fact whatever was announced meanwhile.
                if self._step(attempt, VersionActivated) is not None:
                    del self._replicas[attempt.adapter]
                served = self.served.get(attempt.adapter)
                if served is None or served.version < attempt.version:
                    self.served[attempt.adapter] = Served(attempt.adapter, attempt.version, digest)
                return [Answer(event), *self._refuse_outdated(attempt, now)]
        return []

    def handle_time(self, now: float) -> list[Effect]:
        """Give up on attempts that the controller never finished."""
        effects: list[Effect] = []
        for replica in [r for r in self._replicas.values() if r.deadline <= now]:
            effects += self._drop(replica.attempt, DeadlinePassed)
        return effects

    def next_deadline(self) -> float | None:
        return min((replica.deadline for replica in self._replicas.values()), default=None)

    def reset(self) -> list[Effect]:
        """Another controller run begins: leave every group, drop what was on its way, go on serving."""
        effects: list[Effect] = [Discard(replica.attempt) for replica in self._replicas.values()]
        self._replicas.clear()
        return [*effects, *self._groups.leave_all()]

    def _on_announced(self, event: UpdateAnnounced, now: float) -> list[Effect]:
        attempt = event.attempt
        if self.peer.node not in event.audience:
            return []
        former = self._replicas.get(attempt.adapter)
        if former is not None and former.attempt == attempt:
            self.counters["duplicate"] += 1
            return []
        effects: list[Effect] = []
        if former is not None:
            effects = [Discard(former.attempt)]
        layout = self._layouts.get(event.manifest.layout)
        state = ReplicaState.PREPARING if layout is not None else ReplicaState.WAITING_FOR_LAYOUT
        self._replicas[attempt.adapter] = Replica(event, now + event.timeout + self.timeouts.lease, state)
        served = self.served.get(attempt.adapter)
        refusal: tuple[Reason, str] | None = None
        if self._groups.proposal(attempt.view) is None:
            refusal = (Reason.NOT_IN_VIEW, f"{self.peer} is not in view {attempt.view}")
        elif served is not None and served.version >= attempt.version:
            refusal = (Reason.OUTDATED, f"{self.peer} serves {attempt.adapter}@{served.version} already")
        if refusal is not None:
            return [*effects, *self.handle(NodeRefused(attempt, self.peer, *refusal), now)]
        if layout is None:
            return [*effects, Answer(LayoutRequested(self.peer, event.manifest.layout))]
        return [*effects, Prepare(event, layout)]

    def _on_layout(self, event: LayoutDeclared) -> list[Effect]:
        try:
            layout = AdapterLayout.from_body(event.body)
        except InvalidLayout:
            self.counters["malformed"] += 1
            return []
        self._layouts[layout.digest] = layout
        while len(self._layouts) > LAYOUTS_KEPT:
            self._layouts.popitem(last=False)
        waiting = [
            replica
            for replica in self._replicas.values()
            if replica.state is ReplicaState.WAITING_FOR_LAYOUT and replica.update.manifest.layout == layout.digest
        ]
        return [Prepare(r.update, layout) for r in waiting if self._step(r.attempt, LayoutDeclared)]

    def _on_transfer_started(self, event: TransferStarted, now: float) -> list[Effect]:
        if self.peer.node not in event.audience:
            # Under the quorum policy the others go on without those that were late.
            return self._drop(event.attempt, NodeLeftOut) if self._replica(event.attempt) is not None else []
        replica = self._step(event.attempt, TransferStarted)
        if replica is None:
            return []
        replica.deadline = now + event.timeout + self.timeouts.load + self.timeouts.lease
        return [Receive(event)]

    def _on_received(self, event: AdapterReceived, attempt: Attempt, digest: str) -> list[Effect]:
        replica = self._replica(attempt)
        if replica is not None and digest != replica.update.manifest.digest:
            detail = f"received {digest}, the manifest says {replica.update.manifest.digest}"
            return self.handle(LoadFailed(attempt, self.peer, Reason.DIGEST_MISMATCH, detail), 0.0)
        return [Answer(event), Load(attempt)] if self._step(attempt, AdapterReceived) else []

    def _refuse_outdated(self, activated: Attempt, now: float) -> list[Effect]:
        """The same version may be on its way once more, since this activation was late: it would cost a second slot."""
        replica = self._replicas.get(activated.adapter)
        before_transfer = (ReplicaState.WAITING_FOR_LAYOUT, ReplicaState.PREPARING, ReplicaState.READY)
        if replica is None or replica.attempt.version > activated.version or replica.state not in before_transfer:
            return []
        detail = f"{self.peer} serves {activated} already"
        return self.handle(NodeRefused(replica.attempt, self.peer, Reason.OUTDATED, detail), now)

    def _replica(self, attempt: Attempt) -> Replica | None:
        replica = self._replicas.get(attempt.adapter)
        return replica if replica is not None and replica.attempt == attempt else None

    def _step(self, attempt: Attempt, signal: Signal) -> Replica | None:
        """Move the attempt's replica by the table; None, and counted, if it is not here or not in that state."""
        replica = self._replica(attempt)
        if replica is not None:
            try:
                replica.state = next_state(REPLICA, replica.state, signal)
            except ProtocolError:
                replica = None
        if replica is None:
            self.counters["stale"] += 1
        return replica

    def _drop(self, attempt: Attempt, signal: Signal) -> list[Effect]:
        if self._step(attempt, signal) is None:
            return []
        del self._replicas[attempt.adapter]
        return [Discard(attempt)]


class Source:
    """A trainer's mind: it is rank 0 of its view, sends what is announced as its own, and hears how it ended."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._groups = Groups(peer.node)
        self._announced: dict[str, UpdateAnnounced] = {}
        self._sent: Attempt | None = None

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case ViewProposed() | ViewAbandoned() | ViewJoined() | ViewFailed():
                return self._groups.handle(event)
            case TransferStarted(attempt=self._sent):
                pass  # told again by a snapshot
            case UpdateAnnounced(attempt=attempt, source=self.peer.node):
                self._announced[attempt.adapter] = event
            case TransferStarted(attempt=attempt):
                update = self._announced.get(attempt.adapter)
                proposal = self._groups.proposal(attempt.view)
                if update is not None and update.attempt == attempt and proposal is not None:
                    self._sent = attempt
                    return [Transmit(event, update, proposal)]
            case TransferFailed():
                return [Answer(event)]
            case UpdateAborted(attempt=attempt, final=final):
                update = self._announced.get(attempt.adapter)
                if update is not None and update.attempt == attempt:
                    ended: list[Effect] = [Resolve(update.request, event)] if final else []
                    return [Discard(attempt), *ended]
            case UpdateCompleted(request=request):
                return [Resolve(request, event)]
            case PublishRefused(peer=self.peer, request=request):
                return [Resolve(request, event)]
        return []

    def reset(self) -> list[Effect]:
        """Another controller run begins: leave every group."""
        self._announced.clear()
        return self._groups.leave_all()
