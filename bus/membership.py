"""Who is on the bus: leases and incarnations. Pure; time is an argument, in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bus.events import JoinRequested, NodeCapabilities, Peer, Role, Served, wants


@dataclass(slots=True)
class Participation:
    """One live peer. `following` turns true once it hears published events; only then is it in views.

    `served` is what a rollout node answers with, or what a trainer holds the bytes of.
    """

    peer: Peer
    role: Role
    adapters: tuple[str, ...]
    capabilities: NodeCapabilities | None
    store: str
    heard_at: float
    following: bool = False
    served: dict[str, Served] = field(default_factory=dict)

    def wants(self, adapter: str) -> bool:
        return wants(self.adapters, adapter)

    def note_served(self, served: Served) -> None:
        """A node's version of an adapter only grows: an older report is late, not news."""
        known = self.served.get(served.adapter)
        if known is None or known.version <= served.version:
            self.served[served.adapter] = served


class Membership:
    """The live peers by node name; a peer not heard for `lease` seconds is lost."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._live: dict[str, Participation] = {}
        self._replaced: set[Peer] = set()

    def join(self, event: JoinRequested, now: float) -> Participation | None:
        """Take a peer in; returns the participation it ends, if its node was here before."""
        former = self._live.get(event.peer.node)
        if former is not None and former.peer != event.peer:
            self._replaced.add(former.peer)
        participation = Participation(event.peer, event.role, event.adapters, event.capabilities, event.store, now)
        for served in event.served:
            participation.note_served(served)
        self._live[event.peer.node] = participation
        return former

    def heard(self, peer: Peer, now: float) -> Participation | None:
        """Renew a peer's lease; None for a peer that is not, or no longer, a member."""
        participation = self._live.get(peer.node)
        if participation is None or participation.peer != peer:
            return None
        participation.heard_at = now
        return participation

    def was_replaced(self, peer: Peer) -> bool:
        """Whether a later incarnation of the same node took this peer's place."""
        return peer in self._replaced

    def remove(self, peer: Peer) -> Participation | None:
        """Forget a peer; None if it is not a member."""
        participation = self._live.get(peer.node)
        if participation is None or participation.peer != peer:
            return None
        return self._live.pop(peer.node)

    def expired(self, now: float) -> list[Participation]:
        """Those whose lease has ended, removed."""
        lost = [p for p in self._live.values() if now >= p.heard_at + self.lease]
        for participation in lost:
            del self._live[participation.peer.node]
        return lost

    def next_expiry(self) -> float | None:
        return min((p.heard_at + self.lease for p in self._live.values()), default=None)

    def __iter__(self) -> Iterator[Participation]:
        return iter(self._live.values())

    def __getitem__(self, node: str) -> Participation:
        return self._live[node]

    def get(self, node: str) -> Participation | None:
        return self._live.get(node)

    def following(self, role: Role) -> list[Participation]:
        """The peers of a role that hear what is published, by name."""
        return sorted((p for p in self._live.values() if p.role is role and p.following), key=lambda p: p.peer.node)

    def trainer_of(self, adapter: str) -> Participation | None:
        """The trainer that owns an adapter."""
        return next((p for p in self._live.values() if p.role is Role.TRAINER and adapter in p.adapters), None)
