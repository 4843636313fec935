"""The controller's mind: pure. Events and time go in, effects come out; `controller.py` performs them.

One `Coordinator` runs every view and every update of a fleet. It knows peers, versions and heads, never
sockets, files, tensors or clocks. Feeding it the same events at the same times gives the same effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bus.capabilities import check_servable
from bus.deliveries import Deliveries
from bus.errors import InvalidLayout, Refused
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    ControllerAlive,
    Event,
    JoinAccepted,
    JoinRefused,
    JoinRequested,
    LayoutDeclared,
    LayoutRequested,
    LoadFailed,
    NodeAlive,
    NodeLeft,
    NodeLost,
    NodeQuarantined,
    NodeReady,
    NodeRefused,
    NodeStatus,
    Peer,
    PeerUnknown,
    Policy,
    PublishRequested,
    Reason,
    Role,
    Served,
    SnapshotRequested,
    StatusReported,
    StatusRequested,
    TransferFailed,
    UpdateStatus,
    VersionActivated,
    VersionRetired,
    ViewFailed,
    ViewJoined,
    ViewProposed,
)
from bus.manifest import AdapterLayout
from bus.membership import Membership, Participation
from bus.protocol import (
    DeadlinePassed,
    Effect,
    MembershipChanged,
    Publish,
    Record,
    Send,
    Timeouts,
    ViewState,
)
from bus.update import Head, Update
from bus.view import Views


class Coordinator:
    """Decides; see the tables in `protocol.py`. `run` names this controller run, `events` its event address."""

    def __init__(self, run: str, events: str, timeouts: Timeouts | None = None) -> None:
        self.run = run
        self.events = events
        self.timeouts = timeouts or Timeouts()
        self.members = Membership(self.timeouts.lease)
        self.counters: Counter[str] = Counter()
        self._arriving: dict[str, JoinRequested] = {}
        """By node name: who asked for the place of a live peer, and has not been heard again yet."""
        self._effects: list[Effect] = []
        self._layouts: dict[str, AdapterLayout] = {}
        self._views = Views(run, self.members, self.timeouts)
        self._deliveries = Deliveries(self.members, self._views, self.timeouts, self._effects, self.counters)
        self._handlers: dict[type[Event], Callable[[Any, Participation, float], None]] = {
            NodeAlive: self._on_alive,
            NodeLeft: self._on_left,
            SnapshotRequested: self._on_snapshot,
            StatusRequested: self._on_status,
            LayoutDeclared: self._on_layout,
            LayoutRequested: self._on_layout_requested,
            PublishRequested: self._on_publish,
            ViewJoined: self._on_view_joined,
            ViewFailed: self._on_view_failed,
            NodeReady: self._deliveries.on_ready,
            NodeRefused: self._deliveries.on_refused,
            AdapterReceived: self._deliveries.on_received,
            TransferFailed: self._deliveries.on_transfer_failed,
            AdapterLoaded: self._deliveries.on_loaded,
            LoadFailed: self._deliveries.on_load_failed,
            VersionActivated: self._deliveries.on_activated,
            VersionRetired: self._deliveries.on_retired,
        }

    def __repr__(self) -> str:
        return f"<Coordinator {self.run} {self._deliveries!r}>"

    # ------------------------------------------------------------------------------------- stimuli

    def handle(self, event: Event, peer: Peer, now: float) -> list[Effect]:
        """What to do about an event that `peer` sent; anything stale is counted, nothing is raised."""
        if isinstance(event, JoinRequested):
            self._on_join(event, now)
        else:
            self._on_word(event, peer, now)
        self._settle(now)
        return self._take_effects()

    def _on_word(self, event: Event, peer: Peer, now: float) -> None:
        """A peer that joined, or believes so, says something."""
        arriving = self._arriving.get(peer.node)
        if arriving is not None and arriving.peer == peer:
            del self._arriving[peer.node]
            if not isinstance(event, NodeLeft):
                self._admit(arriving, now)
        if (participation := self.members.heard(peer, now)) is None:
            self._on_stranger(peer)
        elif (handler := self._handlers.get(type(event))) is None:
            self.counters["unexpected"] += 1
        else:
            handler(event, participation, now)

    def handle_time(self, now: float) -> list[Effect]:
        """What to do about the deadlines that have passed."""
        for participation in self.members.expired(now):
            self._lose(participation, f"not heard for {self.timeouts.lease:g} s", now)
        for view in self._views.overdue(now):
            missing = view.nodes - view.joined
            self._effects += self._views.abandon(view, DeadlinePassed, missing, "did not join in time", now)
        self._deliveries.handle_time(now)
        self._settle(now)
        return self._take_effects()

    def next_deadline(self) -> float | None:
        """When `handle_time` must be called next."""
        deadlines = [*self._views.deadlines(), *self._deliveries.deadlines()]
        expiry = self.members.next_expiry()
        return min(deadlines if expiry is None else [*deadlines, expiry], default=None)

    def forgive_silence(self, now: float) -> None:
        """Renew every lease: the controller was not able to hear."""
        for participation in self.members:
            participation.heard_at = now

    def heartbeat(self, sequence: int) -> ControllerAlive:
        return ControllerAlive(sequence, self._head_versions)

    @property
    def heads(self) -> dict[str, Head]:
        """The newest committed version of each adapter."""
        return self._deliveries.heads

    @property
    def _head_versions(self) -> tuple[Served, ...]:
        return tuple(head.served for head in self.heads.values())

    def restore(self, events: Iterable[Event]) -> list[Effect]:
        """Take up what a journal says: heads, numbers, layouts; what was in flight is over, and its number burned."""
        for event in events:
            match event:
                case LayoutDeclared(digest, body):
                    self._layouts[digest] = AdapterLayout.from_body(body)
                case ViewProposed(view=view):
                    self._views.last_number = max(self._views.last_number, view)
                case _:
                    self._deliveries.restore(event)
        self._deliveries.finish_restored()
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # ---------------------------------------------------------------------------------- membership

    def _on_join(self, event: JoinRequested, now: float) -> None:
        if self.members.was_replaced(event.peer):
            self._refuse_replaced(event.peer)
            return
        for adapter in event.adapters if event.role is Role.TRAINER else ():
            owner = self.members.trainer_of(adapter)
            if owner is not None and owner.peer != event.peer:
                left = owner.heard_at + self.timeouts.lease - now
                detail = (
                    f"{owner.peer.node} is publishing {adapter}, and one live trainer may own an adapter; "
                    f"if it is gone, its lease ends in {left:.1f} s"
                )
                self._effects.append(Send(event.peer, JoinRefused(event.peer, Reason.ADAPTER_TAKEN, detail)))
                return
        former = self.members.get(event.peer.node)
        if former is not None and former.peer != event.peer:
            # This may be the last word of a process that is gone: it takes the place once it is heard again.
            self._arriving[event.peer.node] = event
        else:
            self._admit(event, now)
        welcome = JoinAccepted(
            event.peer, self.events, self.timeouts.heartbeat, self.timeouts.lease, self._head_versions
        )
        self._effects.append(Send(event.peer, welcome))

    def _admit(self, event: JoinRequested, now: float) -> None:
        former = self.members.join(event, now)
        if former is not None and (former.peer != event.peer or former.following):
            self._lose(former, "joined anew", now)
        self._effects.append(Record(event))
        for served in event.served:
            self._deliveries.note_served(served)

    def _on_stranger(self, peer: Peer) -> None:
        if self.members.was_replaced(peer):
            self._refuse_replaced(peer)
        else:
            self._effects.append(Send(peer, PeerUnknown(peer)))
        self.counters["stranger"] += 1

    def _refuse_replaced(self, peer: Peer) -> None:
        detail = f"another process joined as {peer.node}; give each node a name of its own"
        self._effects.append(Send(peer, JoinRefused(peer, Reason.NAME_TAKEN, detail)))

    def _on_alive(self, event: NodeAlive, participation: Participation, now: float) -> None:
        for served in event.served:
            participation.note_served(served)
        if event.sequence and not participation.following:
            # It hears what is published and believes that we know: its request, or its joining, went astray.
            self._tell_present(participation)

    def _on_left(self, event: NodeLeft, participation: Participation, now: float) -> None:
        self.members.remove(participation.peer)
        self._effects.append(Record(event))
        self._forget(participation, "left", now)

    def _lose(self, participation: Participation, detail: str, now: float) -> None:
        if participation.role is not Role.OBSERVER:
            self._effects.append(Publish(NodeLost(participation.peer, detail)))
        if participation.role is Role.ROLLOUT:
            node = participation.peer.node
            self._deliveries.note_lost(participation, detail)
            if seconds := self._views.quarantine.note_loss(node, now):
                self._effects.append(Publish(NodeQuarantined(node, self.timeouts.losses, seconds)))
        self._forget(participation, detail, now)

    def _forget(self, participation: Participation, detail: str, now: float) -> None:
        """End what a peer that is gone had a part in."""
        self._deliveries.lose(participation, detail, now)
        node = participation.peer.node
        for view in [view for view in self._views if node in view.nodes]:
            self._effects += self._views.abandon(view, NodeLost, {node}, detail, now)
        self._views.forget(participation.peer)

    def _on_snapshot(self, event: SnapshotRequested, participation: Participation, now: float) -> None:
        self._tell_present(participation)

    def _tell_present(self, participation: Participation) -> None:
        """Tell a peer the present as the events that made it; from here on it hears what is published."""
        peer = participation.peer
        participation.following = True
        for view in self._views:
            if peer.node in view.nodes and view.state is ViewState.PROPOSED:
                self._effects.append(Send(peer, view.proposal))
        self._deliveries.snapshot(participation)

    # --------------------------------------------------------------------------------------- views

    def _settle(self, now: float) -> None:
        """Bring each source's view up to its members, and start what waits for it."""
        for trainer in self.members.following(Role.TRAINER):
            source = trainer.peer.node
            if self._deliveries.is_busy(source):
                continue
            view = self._views.of(source)
            if view is not None and view.state is ViewState.FORMED:
                if view.proposal.members == self._views.wanted_members(trainer):
                    self._deliveries.start_next(trainer, view, now)
                    continue
                self._effects += self._views.abandon(view, MembershipChanged, set(), "membership changed", now)
                view = None
            if view is None:
                self._effects += self._views.propose(trainer, now)

    def _on_view_joined(self, event: ViewJoined, participation: Participation, now: float) -> None:
        view = self._views.numbered(event.view)
        if view is None or not view.step(ViewJoined):
            self.counters["stale"] += 1
            return
        self._effects.append(Record(event))
        self._effects += self._views.join(view, participation.peer.node)

    def _on_view_failed(self, event: ViewFailed, participation: Participation, now: float) -> None:
        view = self._views.numbered(event.view)
        if view is None or view.state is not ViewState.PROPOSED:
            self.counters["stale"] += 1
            return
        self._effects.append(Record(event))
        missing = (set(event.missing) & view.nodes) or {participation.peer.node}
        self._effects += self._views.abandon(view, ViewFailed, missing, event.detail, now)

    # ------------------------------------------------------------------------------------- publish

    def _on_layout(self, event: LayoutDeclared, participation: Participation, now: float) -> None:
        if event.digest in self._layouts:
            return
        try:
            layout = AdapterLayout.from_body(event.body)
        except InvalidLayout:
            self.counters["malformed"] += 1
            return
        if layout.digest != event.digest:
            self.counters["malformed"] += 1
            return
        self._layouts[event.digest] = layout
        self._effects.append(Record(event))

    def _on_layout_requested(self, event: LayoutRequested, participation: Participation, now: float) -> None:
        layout = self._layouts.get(event.digest)
        if layout is not None:
            self._effects.append(Send(participation.peer, LayoutDeclared(event.digest, layout.body)))

    def _on_publish(self, event: PublishRequested, participation: Participation, now: float) -> None:
        update = Update(
            event.request,
            event.adapter,
            participation.peer.node,
            event.manifest,
            now,
            now + event.timeout,
            event.policy,
            event.quorum if event.policy is Policy.QUORUM else 0,
        )
        node, reason, detail = self._why_refused(event, participation)
        if reason is not None:
            self._deliveries.refuse(update, participation.peer, node, reason, detail)
        else:
            self._deliveries.admit(update, participation.peer, supersede=event.supersede)

    def _why_refused(self, event: PublishRequested, trainer: Participation) -> tuple[str, Reason | None, str]:
        """The node, reason and detail for which a publish gets no number, if there is one."""
        if trainer.role is not Role.TRAINER or event.adapter not in trainer.adapters:
            return "", Reason.NOT_ALLOWED, f"{trainer.peer.node} did not join as the trainer of {event.adapter}"
        layout = self._layouts.get(event.manifest.layout)
        if layout is None:
            return "", Reason.LAYOUT_UNKNOWN, f"layout {event.manifest.layout} was not declared"
        if event.manifest != replace(
            event.manifest, nbytes=layout.nbytes, tensors=len(layout.tensors), rank=layout.rank
        ):
            return "", Reason.UNSUPPORTED_ADAPTER, "the manifest's sizes are not those of its layout"
        for node in self.members if event.policy is Policy.STRICT else ():
            if node.role is Role.ROLLOUT and node.capabilities is not None and node.wants(event.adapter):
                try:
                    check_servable(layout, node.capabilities)
                except Refused as refused:
                    return node.peer.node, Reason(refused.reason), refused.detail
        return "", None, ""

    # ------------------------------------------------------------------------------------- status

    def _on_status(self, event: StatusRequested, participation: Participation, now: float) -> None:
        nodes = tuple(
            NodeStatus(
                p.peer,
                p.role,
                p.following,
                now - p.heard_at,
                tuple(p.served.values()),
                p.adapters,
                p.capabilities,
                self._views.quarantine.remaining(p.peer.node, now),
            )
            for p in sorted(self.members, key=lambda p: (p.role, p.peer.node))
            if p.role is not Role.OBSERVER
        )
        updates = tuple(
            UpdateStatus(u.attempt, u.phase, now - u.requested_at, tuple(u.waiting_for))
            for u in self._deliveries.updates()
        )
        report = StatusReported(
            0,
            nodes,
            self._head_versions,
            updates,
            tuple(self._deliveries.completed)[-10:],
            tuple(sorted(self.counters.items())),
        )
        self._effects.append(Send(participation.peer, report))
