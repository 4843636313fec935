"""What must always hold, checked where it can break: I1 to I8 of the protocol.

I1  no two nodes serve different bytes under the same adapter and version, nor bytes that were not committed
I2  the version a node serves never goes back
I3  a committed version was loaded, with the manifest's bytes, by every node that its policy asks for
I4  nobody enters a transfer before every node of its audience was ready for that attempt; no stale answer counts
I5  at most one transfer of a group at a time
I6  once faults stop, every live node reaches every head, and publishes go through, in bounded time
I7  whatever crashes: no number twice, no burned number again, no committed version lost, journal before publish
I8  a request is answered by the version that its response names

The evidence is physical: what engines and groups did, not what anybody said. Each check costs a few dictionary
look-ups at the moment it concerns. This module knows nothing of networks, faults or time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from bus.coordinator import Coordinator
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    LoadFailed,
    NodeReady,
    NodeRefused,
    Peer,
    Policy,
    PublishRequested,
    Served,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    UpdateCompleted,
    VersionActivated,
    VersionCommitted,
)
from bus.participant import Participant
from tools.simulation.engine import ModelledEngine


class Violation(Exception):
    """An invariant that does not hold."""

    def __init__(self, invariant: str, detail: str) -> None:
        self.invariant = invariant
        self.detail = detail
        super().__init__(f"{invariant}: {detail}")


class Node(Protocol):
    """What the invariants look at in a rollout node."""

    peer: Peer
    participant: Participant
    engine: ModelledEngine


@dataclass(frozen=True, slots=True)
class Announced:
    """An attempt as the journal has it, and who was behind each name of its audience then."""

    event: UpdateAnnounced
    peers: dict[str, Peer]


class Invariants:
    """The ledger of one world; every method is told of something that happened, and raises `Violation`."""

    def __init__(self) -> None:
        self.heads: dict[str, Served] = {}
        """The newest version of each adapter that the journal says was committed."""
        self._sequence = 0
        self._requests: dict[str, PublishRequested] = {}
        self._announced: dict[Attempt, Announced] = {}
        self._current: dict[str, Attempt] = {}
        self._owner: dict[tuple[str, int], str] = {}
        self._newest: Counter[str] = Counter()
        self._burned: set[tuple[str, int]] = set()
        self._committed: dict[tuple[str, int], str] = {}
        self._prepared: set[tuple[Attempt, Peer]] = set()
        self._loaded: dict[tuple[Attempt, Peer], str] = {}
        self._served: dict[tuple[Peer, str], int] = {}

    # ------------------------------------------------------------------------------ trainer's side

    def requested(self, event: PublishRequested) -> None:
        self._requests[event.request] = event

    def resolved(self, request: PublishRequested, end: Event) -> None:
        """A publish was told how it ended."""
        match end:
            case UpdateCompleted(attempt=attempt, digest=digest):
                committed = self._committed.get((attempt.adapter, attempt.version))
                if committed is None or committed != digest or digest != request.manifest.digest:
                    raise Violation("I3", f"publish() returned {attempt} with {digest}, committed is {committed}")
            case UpdateAborted(attempt=attempt):
                if (attempt.adapter, attempt.version) in self._committed:
                    raise Violation("I3", f"publish() was told that {attempt} failed, but it is committed")

    # ------------------------------------------------------------------------- controller's side

    def journaled(self, sequence: int, event: Event, coordinator: Coordinator) -> None:
        if sequence != self._sequence + 1:
            raise Violation("I7", f"journal entry {sequence} follows entry {self._sequence}")
        self._sequence = sequence
        match event:
            case UpdateAnnounced():
                self._on_announced(event, coordinator)
            case VersionCommitted(attempt=attempt, digest=digest):
                self._on_committed(attempt, digest)
            case NodeReady() | NodeRefused() | AdapterReceived() | AdapterLoaded() | LoadFailed() | VersionActivated():
                self._on_answer(event.attempt, event.peer, type(event).__name__)
            case UpdateCompleted(attempt=attempt) | UpdateAborted(attempt=attempt, final=False):
                self._current.pop(attempt.adapter, None)
            case UpdateAborted(attempt=attempt, final=True):
                self._current.pop(attempt.adapter, None)
                if (attempt.adapter, attempt.version) in self._committed:
                    raise Violation("I7", f"{attempt} was aborted after it was committed")
                self._burned.add((attempt.adapter, attempt.version))

    def published(self, sequence: int, event: Event) -> None:
        if sequence > self._sequence:
            raise Violation("I7", f"{type(event).__name__} was published before it was journaled")

    def _on_announced(self, event: UpdateAnnounced, coordinator: Coordinator) -> None:
        attempt = event.attempt
        key = (attempt.adapter, attempt.version)
        if attempt in self._announced:
            raise Violation("I7", f"{attempt} was announced twice as attempt {attempt.number} in view {attempt.view}")
        members = {node: coordinator.members.get(node) for node in event.audience}
        peers = {node: member.peer for node, member in members.items() if member is not None}
        self._announced[attempt] = Announced(event, peers)
        self._current[attempt.adapter] = attempt
        if event.catch_up:
            if self._committed.get(key) != event.manifest.digest:
                raise Violation("I7", f"{attempt} is brought to late nodes, but was not committed")
            return
        if key in self._burned:
            raise Violation("I7", f"{attempt} was announced again after its number was burned")
        if key in self._committed:
            raise Violation("I7", f"{attempt} was announced again after it was committed")
        owner = self._owner.setdefault(key, event.request)
        if owner != event.request:
            raise Violation("I7", f"{attempt} is the number of two publishes, {owner} and {event.request}")
        if attempt.version < self._newest[attempt.adapter]:
            raise Violation("I7", f"{attempt} was announced after {attempt.adapter}@{self._newest[attempt.adapter]}")
        self._newest[attempt.adapter] = attempt.version

    def _on_answer(self, attempt: Attempt, peer: Peer, kind: str) -> None:
        """The controller counted an answer: it must be for the attempt under way, by the process that was asked."""
        if self._current.get(attempt.adapter) != attempt:
            raise Violation("I4", f"a {kind} of {peer} for a past attempt of {attempt} was counted")
        asked = self._announced[attempt].peers.get(peer.node)
        if asked != peer:
            raise Violation("I4", f"a {kind} of {peer.node} was counted that another incarnation was asked for")

    def _on_committed(self, attempt: Attempt, digest: str) -> None:
        key = (attempt.adapter, attempt.version)
        announced = self._announced.get(attempt)
        if announced is None:
            raise Violation("I3", f"{attempt} was committed, but not announced")
        if key in self._committed or key in self._burned:
            raise Violation("I7", f"{attempt} was committed after it had ended")
        request = self._requests[announced.event.request]
        if digest != request.manifest.digest:
            raise Violation("I3", f"{attempt} was committed with {digest}, the trainer sent {request.manifest.digest}")
        confirmed = self._confirmed(announced, digest)
        missing = sorted(announced.event.audience - confirmed.keys())
        needed = len(announced.event.audience)
        if request.policy is Policy.QUORUM:
            needed = request.quorum or needed // 2 + 1
        if len(confirmed) < needed:
            raise Violation("I3", f"{attempt} was committed though {', '.join(missing)} had not loaded it")
        self._committed[key] = digest
        self.heads[attempt.adapter] = Served(attempt.adapter, attempt.version, digest)

    def _confirmed(self, announced: Announced, digest: str) -> dict[str, Peer]:
        """Those of an audience that hold the very bytes, as the process that was announced to."""
        attempt = announced.event.attempt
        return {node: peer for node, peer in announced.peers.items() if self._loaded.get((attempt, peer)) == digest}

    def coordinated(self, coordinator: Coordinator) -> None:
        """The coordinator has taken a step."""
        for adapter, served in self.heads.items():
            head = coordinator.heads.get(adapter)
            if head is None or head.served != served:
                raise Violation("I7", f"the controller's head is {head and head.served}, committed is {served}")

    # ------------------------------------------------------------------------------- node's side

    def prepared(self, peer: Peer, attempt: Attempt) -> None:
        self._prepared.add((attempt, peer))

    def entered(self, peer: Peer, started: TransferStarted, others: list[Attempt]) -> None:
        """A rank enters a transfer, while `others` are under way in its group."""
        attempt = started.attempt
        if others:
            raise Violation("I5", f"{peer} entered the transfer of {attempt} while {others[0]} used the same group")
        announced = self._announced.get(attempt)
        if announced is None:
            raise Violation("I7", f"{peer} entered the transfer of {attempt}, which the journal does not know")
        for node in started.audience:
            if (attempt, announced.peers[node]) not in self._prepared:
                raise Violation("I4", f"{peer} entered the transfer of {attempt} before {node} was ready")

    def loaded(self, peer: Peer, attempt: Attempt, digest: str) -> None:
        self._loaded[attempt, peer] = digest

    def serves(self, node: Node) -> None:
        """Something changed in what a node serves."""
        for adapter, resident in node.engine.alias.items():
            version = resident.attempt.version
            content = node.engine.contents.get(resident.lora_id)
            committed = self._committed.get((adapter, version))
            if committed is None:
                raise Violation("I1", f"{node.peer} serves {adapter}@{version}, which was not committed")
            if content != committed:
                raise Violation("I1", f"{node.peer} serves {content} as {adapter}@{version}, committed is {committed}")
            before = self._served.get((node.peer, adapter), 0)
            if version < before:
                raise Violation("I2", f"{node.peer} serves {adapter}@{version} after {adapter}@{before}")
            self._served[node.peer, adapter] = version
        for adapter, served in node.participant.served.items():
            current = node.engine.alias.get(adapter)
            if current is None or current.attempt.version != served.version:
                raise Violation("I1", f"{node.peer} claims {adapter}@{served.version}, but does not serve it")

    def answered(self, peer: Peer, named: Attempt, content: str, answered_with: str | None) -> None:
        """A request that was admitted to the version `named`, then `content`, has ended."""
        if answered_with != content:
            raise Violation("I8", f"{peer} answered as {named} with {answered_with}, admitted with {content}")
        if self._committed.get((named.adapter, named.version)) != content:
            raise Violation("I8", f"{peer} answered as {named} with {content}, which was not committed")
