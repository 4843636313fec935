"""The views of a fleet: which group each source has, who is in it, who is kept out of it. Pure.

A view's members are fixed; when they should change, the view is abandoned and the next number proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bus.errors import ProtocolError
from bus.events import Member, Peer, Role, ViewAbandoned, ViewFormed, ViewProposed
from bus.membership import Membership, Participation
from bus.protocol import VIEW, Effect, Publish, Signal, Timeouts, ViewState, next_state
from bus.quarantine import Quarantine

VIEW_GRACE: Final = 1.0
"""Seconds that the controller waits longer for a view than its members do, so that they name the missing."""


@dataclass(slots=True, eq=False)
class View:
    """A group of one source: its proposal, and who is in it already."""

    proposal: ViewProposed
    deadline: float
    state: ViewState = ViewState.PROPOSED
    joined: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> set[str]:
        return {member.node for member in self.proposal.members}

    def step(self, signal: Signal) -> bool:
        """Move by the table; False if the signal does not apply to the state."""
        try:
            self.state = next_state(VIEW, self.state, signal)
        except ProtocolError:
            return False
        return True


class Views:
    """The view in force of every source."""

    def __init__(self, run: str, members: Membership, timeouts: Timeouts) -> None:
        self.last_number = 0
        self.quarantine = Quarantine(timeouts)
        self._run = run
        self._members = members
        self._timeouts = timeouts
        self._of: dict[str, View] = {}
        self._kept_out: dict[Peer, float] = {}

    def __iter__(self) -> Iterator[View]:
        return iter(list(self._of.values()))

    def of(self, source: str) -> View | None:
        """A source's view in force; None while it has none."""
        view = self._of.get(source)
        return None if view is None or view.state is ViewState.ABANDONED else view

    def numbered(self, number: int) -> View | None:
        return next((view for view in self._of.values() if view.proposal.view == number), None)

    def wanted_members(self, trainer: Participation) -> tuple[Member, ...]:
        """The source as rank 0, then every worker of every live node that follows one of its adapters."""
        members = [Member(trainer.peer.node, 0)]
        for node in self._members.following(Role.ROLLOUT):
            if (
                node.peer not in self._kept_out
                and node.peer.node not in self.quarantine
                and node.capabilities is not None
                and any(map(node.wants, trainer.adapters))
            ):
                members += [Member(node.peer.node, worker) for worker in range(node.capabilities.workers)]
        return tuple(members)

    def propose(self, trainer: Participation, now: float) -> list[Effect]:
        """Propose the next view of a source, unless nobody follows it or it is itself kept out."""
        members = self.wanted_members(trainer)
        if len(members) < 2 or trainer.peer in self._kept_out:
            return []
        self.last_number += 1
        # Another controller run may count views from one again; its keys in the store must not meet ours.
        store = f"{trainer.store}/{self._run}"
        proposal = ViewProposed(self.last_number, trainer.peer.node, members, store, self._timeouts.view)
        self._of[trainer.peer.node] = View(proposal, now + self._timeouts.view + VIEW_GRACE)
        return [Publish(proposal)]

    def join(self, view: View, node: str) -> list[Effect]:
        """A node is in; the last one forms the view."""
        view.joined.add(node)
        if view.joined == view.nodes and view.step(ViewFormed):
            return [Publish(ViewFormed(view.proposal.view, view.proposal.source))]
        return []

    def abandon(self, view: View, signal: Signal, missing: set[str], detail: str, now: float) -> list[Effect]:
        """Give a view up; those who kept it from forming stay out of the next ones for a while."""
        was_proposed = view.state is ViewState.PROPOSED
        if not view.step(signal):
            return []
        if was_proposed:
            for participation in filter(None, map(self._members.get, missing)):
                self._kept_out[participation.peer] = now + self._timeouts.view
        proposal = view.proposal
        return [Publish(ViewAbandoned(proposal.view, proposal.source, tuple(sorted(missing)), detail))]

    def forget(self, peer: Peer) -> None:
        """A peer is gone: it has no view of its own and nothing to be kept out of."""
        self._kept_out.pop(peer, None)
        self._of.pop(peer.node, None)

    def overdue(self, now: float) -> list[View]:
        """Views that did not form in time; also lets those back in whose time outside is over."""
        self.quarantine.release(now)
        for peer in [peer for peer, until in self._kept_out.items() if until <= now]:
            del self._kept_out[peer]
        return [view for view in self if view.state is ViewState.PROPOSED and view.deadline <= now]

    def deadlines(self) -> list[float]:
        proposed = [view.deadline for view in self if view.state is ViewState.PROPOSED]
        return [*proposed, *self._kept_out.values(), *self.quarantine.deadlines()]
