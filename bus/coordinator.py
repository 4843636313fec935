"""The controller's mind: pure. Events and time go in, effects come out; `controller.py` performs them.

One `Coordinator` runs every view and every update of a fleet. It knows peers, versions and heads, never
sockets, files, tensors or clocks. Feeding it the same events at the same times gives the same effects.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from bus.capabilities import check_servable
from bus.errors import InvalidLayout, ProtocolError, Refused
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
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
    NodeOutcome,
    NodeReady,
    NodeRefused,
    NodeStatus,
    Outcome,
    Peer,
    PeerUnknown,
    Phase,
    PublishRefused,
    PublishRequested,
    Reason,
    Role,
    Served,
    SnapshotRequested,
    StatusReported,
    StatusRequested,
    TransferFailed,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    UpdateCompleted,
    UpdateStatus,
    VersionActivated,
    VersionCommitted,
    VersionRetired,
    ViewFailed,
    ViewJoined,
    ViewProposed,
)
from bus.manifest import AdapterLayout
from bus.membership import Membership, Participation
from bus.protocol import (
    UPDATE,
    AttemptsExhausted,
    DeadlinePassed,
    Effect,
    EveryoneActivated,
    EveryoneLoaded,
    EveryoneReady,
    EveryoneReceived,
    MembershipChanged,
    Publish,
    Record,
    Send,
    Signal,
    SourceLost,
    Timeouts,
    UpdateState,
    ViewBroken,
    ViewState,
    next_state,
)
from bus.update import Head, Update
from bus.view import View, Views

COMPLETED_KEPT: Final = 50
"""How many finished updates `status` can show."""

CATCH_UP_PAUSE: Final = 10.0
"""Seconds before a node that failed to catch up is tried again."""


class Coordinator:
    """Decides; see the tables in `protocol.py`. `run` names this controller run, `events` its event address."""

    def __init__(self, run: str, events: str, timeouts: Timeouts | None = None) -> None:
        self.run = run
        self.events = events
        self.timeouts = timeouts or Timeouts()
        self.members = Membership(self.timeouts.lease)
        self.heads: dict[str, Head] = {}
        self.completed: deque[UpdateCompleted] = deque(maxlen=COMPLETED_KEPT)
        self.counters: Counter[str] = Counter()
        self._layouts: dict[str, AdapterLayout] = {}
        self._newest: Counter[str] = Counter()
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._views = Views(run, self.members, self.timeouts)
        self._catch_up_at: dict[tuple[Peer, str], float] = {}
        self._queues: dict[str, deque[Update]] = {}
        self._active: dict[str, Update] = {}
        self._ended: dict[str, UpdateCompleted | UpdateAborted] = {}
        self._effects: list[Effect] = []
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
            NodeReady: self._on_ready,
            NodeRefused: self._on_refused,
            AdapterReceived: self._on_received,
            TransferFailed: self._on_transfer_failed,
            AdapterLoaded: self._on_loaded,
            LoadFailed: self._on_load_failed,
            VersionActivated: self._on_activated,
            VersionRetired: self._on_retired,
        }

    def __repr__(self) -> str:
        return f"<Coordinator {self.run} heads={self.heads} views={self._views} active={self._active}>"

    # ------------------------------------------------------------------------------------- stimuli

    def handle(self, event: Event, peer: Peer, now: float) -> list[Effect]:
        """What to do about an event that `peer` sent; anything stale is counted, nothing is raised."""
        if isinstance(event, JoinRequested):
            self._on_join(event, now)
        elif (participation := self.members.heard(peer, now)) is None:
            self._on_stranger(peer)
        elif (handler := self._handlers.get(type(event))) is None:
            self.counters["unexpected"] += 1
        else:
            handler(event, participation, now)
        self._settle(now)
        return self._take_effects()

    def handle_time(self, now: float) -> list[Effect]:
        """What to do about the deadlines that have passed."""
        for participation in self.members.expired(now):
            self._lose(participation, f"not heard for {self.timeouts.lease:g} s", now)
        for view in self._views.overdue(now):
            missing = view.nodes - view.joined
            self._effects += self._views.abandon(view, DeadlinePassed, missing, "did not join in time", now)
        for update in [u for u in self._updates() if u.due <= now]:
            if update.state is UpdateState.COMMITTED:
                self._complete(update, DeadlinePassed, now)
            else:
                self._miss_deadline(update, now)
        for key in [key for key, at in self._catch_up_at.items() if at <= now]:
            del self._catch_up_at[key]
        self._settle(now)
        return self._take_effects()

    def next_deadline(self) -> float | None:
        """When `handle_time` must be called next."""
        expiry = self.members.next_expiry()
        deadlines = [*self._views.deadlines(), *(u.due for u in self._updates()), *self._catch_up_at.values()]
        return min([*deadlines, expiry] if expiry is not None else deadlines, default=None)

    def _updates(self) -> list[Update]:
        return [*self._active.values(), *(update for queue in self._queues.values() for update in queue)]

    def forgive_silence(self, now: float) -> None:
        """Renew every lease: the controller was not able to hear."""
        for participation in self.members:
            participation.heard_at = now

    def heartbeat(self, sequence: int) -> ControllerAlive:
        return ControllerAlive(sequence, tuple(head.served for head in self.heads.values()))

    def restore(self, events: Iterable[Event]) -> list[Effect]:
        """Take up what a journal says: heads, numbers, layouts; what was in flight is over, and its number burned."""
        open_attempts: dict[tuple[str, int], UpdateAnnounced] = {}
        for event in events:
            match event:
                case LayoutDeclared(digest, body):
                    self._layouts[digest] = AdapterLayout.from_body(body)
                case ViewProposed(view=view):
                    self._views.last_number = max(self._views.last_number, view)
                case UpdateAnnounced(attempt=attempt):
                    key = (attempt.adapter, attempt.version)
                    self._newest[attempt.adapter] = max(self._newest[attempt.adapter], attempt.version)
                    self._attempts[key] = max(self._attempts[key], attempt.number)
                    if not event.catch_up:
                        open_attempts[key] = event
                case VersionCommitted(attempt=attempt):
                    announced = open_attempts.pop((attempt.adapter, attempt.version))
                    self.heads[attempt.adapter] = Head(attempt, announced.manifest)
                case UpdateAborted(attempt=attempt, final=True):
                    open_attempts.pop((attempt.adapter, attempt.version), None)
                case UpdateCompleted():
                    self.completed.append(event)
        for event in open_attempts.values():
            self._effects.append(
                Publish(
                    UpdateAborted(
                        event.attempt,
                        Phase.QUEUE,
                        "",
                        Reason.CONTROLLER_RESTARTED,
                        "the controller restarted before the version was committed",
                        final=True,
                        seconds=0.0,
                    )
                )
            )
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    # ---------------------------------------------------------------------------------- membership

    def _on_join(self, event: JoinRequested, now: float) -> None:
        if self.members.was_replaced(event.peer):
            detail = f"another process joined as {event.peer.node}; give each node a name of its own"
            self._effects.append(Send(event.peer, JoinRefused(event.peer, Reason.NAME_TAKEN, detail)))
            return
        for adapter in event.adapters if event.role is Role.TRAINER else ():
            owner = self.members.trainer_of(adapter)
            if owner is not None and owner.peer.node != event.peer.node:
                detail = f"{owner.peer.node} is publishing {adapter}; one live trainer may own an adapter"
                self._effects.append(Send(event.peer, JoinRefused(event.peer, Reason.ADAPTER_TAKEN, detail)))
                return
        former = self.members.join(event, now)
        if former is not None and (former.peer != event.peer or former.following):
            self._lose(former, "joined anew", now)
        self._effects.append(Record(event))
        for served in event.served:
            self._newest[served.adapter] = max(self._newest[served.adapter], served.version)
        heads = tuple(head.served for head in self.heads.values())
        welcome = JoinAccepted(event.peer, self.events, self.timeouts.heartbeat, self.timeouts.lease, heads)
        self._effects.append(Send(event.peer, welcome))

    def _on_stranger(self, peer: Peer) -> None:
        if self.members.was_replaced(peer):
            detail = f"another process joined as {peer.node}; give each node a name of its own"
            self._effects.append(Send(peer, JoinRefused(peer, Reason.NAME_TAKEN, detail)))
        else:
            self._effects.append(Send(peer, PeerUnknown(peer)))
        self.counters["stranger"] += 1

    def _on_alive(self, event: NodeAlive, participation: Participation, now: float) -> None:
        for served in event.served:
            participation.note_served(served)

    def _on_left(self, event: NodeLeft, participation: Participation, now: float) -> None:
        self.members.remove(participation.peer)
        self._effects.append(Record(event))
        self._forget(participation, "left", now)

    def _lose(self, participation: Participation, detail: str, now: float) -> None:
        if participation.role is not Role.OBSERVER:
            self._effects.append(Publish(NodeLost(participation.peer, detail)))
        self._forget(participation, detail, now)

    def _forget(self, participation: Participation, detail: str, now: float) -> None:
        """End what a peer that is gone had a part in."""
        node = participation.peer.node
        for update in [u for u in self._active.values() if node in u.audience]:
            self._lose_node(update, node, detail, now)
        for view in [view for view in self._views if node in view.nodes]:
            self._effects += self._views.abandon(view, NodeLost, {node}, detail, now)
        self._views.forget(participation.peer)
        if participation.role is Role.TRAINER:
            for update in [u for u in self._updates() if u.source == node and u.state is not UpdateState.COMMITTED]:
                self._abort(update, SourceLost, node, Reason.SOURCE_LOST, f"the trainer {detail}", now)

    def _on_snapshot(self, event: SnapshotRequested, participation: Participation, now: float) -> None:
        """Tell a peer the present as the events that made it; from here on it hears what is published."""
        peer = participation.peer
        participation.following = True
        for view in self._views:
            if peer.node in view.nodes and view.state is ViewState.PROPOSED:
                self._effects.append(Send(peer, view.proposal))
        for head in self.heads.values():
            self._effects.append(Send(peer, VersionCommitted(head.attempt, head.manifest.digest)))
        for adapter in participation.adapters if participation.role is Role.TRAINER else ():
            if (ended := self._ended.get(adapter)) is not None:
                self._effects.append(Send(peer, ended))

    # --------------------------------------------------------------------------------------- views

    def _settle(self, now: float) -> None:
        """Bring each source's view up to its members, and start what waits for it."""
        for trainer in self.members.following(Role.TRAINER):
            source = trainer.peer.node
            if source in self._active:
                continue
            view = self._views.of(source)
            if view is not None and view.state is ViewState.FORMED:
                if view.proposal.members == self._views.wanted_members(trainer):
                    self._start_next(trainer, view, now)
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
        if any(update.request == event.request for update in self._updates()):
            self.counters["duplicate"] += 1
            return
        node, reason, detail = self._why_refused(event, participation)
        if reason is not None:
            refused = PublishRefused(participation.peer, event.request, event.adapter, node, reason, detail)
            self._effects += [Record(refused), Send(participation.peer, refused)]
            return
        self._queues.setdefault(participation.peer.node, deque()).append(
            Update(event.request, event.adapter, participation.peer.node, event.manifest, now, now + event.timeout)
        )

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
        for node in self.members:
            if node.role is Role.ROLLOUT and node.capabilities is not None and node.wants(event.adapter):
                try:
                    check_servable(layout, node.capabilities)
                except Refused as refused:
                    return node.peer.node, Reason(refused.reason), refused.detail
        return "", None, ""

    def _start_next(self, trainer: Participation, view: View, now: float) -> None:
        """Announce what waits for this view: a publish first, else the head to nodes that lack it."""
        queue = self._queues.get(trainer.peer.node)
        update = queue.popleft() if queue else self._catch_up(trainer, view, now)
        if update is None:
            return
        followers = (self.members[node] for node in sorted(view.nodes - {trainer.peer.node}))
        audience = tuple(node.peer.node for node in followers if node.wants(update.adapter))
        if update.targets:
            audience = update.targets
        if not audience:
            self._queues[trainer.peer.node].appendleft(update)
            return
        if not update.version:
            self._newest[update.adapter] += 1
            update.version = self._newest[update.adapter]
        self._step(update, UpdateAnnounced, now)
        update.number = self._attempts[update.adapter, update.version]
        update.begin_attempt(view.proposal.view, audience, now + self.timeouts.ready)
        self._attempts[update.adapter, update.version] = update.number
        self._active[trainer.peer.node] = update
        announced = UpdateAnnounced(
            update.attempt,
            update.request,
            update.source,
            audience,
            update.manifest,
            self.timeouts.ready,
            catch_up=bool(update.targets),
        )
        self._effects.append(Publish(announced))

    def _catch_up(self, trainer: Participation, view: View, now: float) -> Update | None:
        for adapter in trainer.adapters:
            head = self.heads.get(adapter)
            if head is None or trainer.served.get(adapter) != head.served:
                continue
            nodes = (self.members[node] for node in sorted(view.nodes - {trainer.peer.node}))
            lagging = tuple(
                node.peer.node
                for node in nodes
                if node.wants(adapter)
                and (node.peer, adapter) not in self._catch_up_at
                and (node.served[adapter].version if adapter in node.served else 0) < head.attempt.version
            )
            if lagging:
                update = Update(
                    "", adapter, trainer.peer.node, head.manifest, now, now + self.timeouts.publish, lagging
                )
                update.version = head.attempt.version
                return update
        return None

    # -------------------------------------------------------------------------- the life of an update

    def _current(self, attempt: Attempt, node: str) -> Update | None:
        """The update in flight that an answer belongs to; an answer for any other attempt is stale."""
        for update in self._active.values():
            if update.attempt == attempt and node in update.audience:
                return update
        self.counters["stale"] += 1
        return None

    def _step(self, update: Update, signal: Signal, now: float) -> bool:
        """Move an update by the table; False, and counted, if the signal does not apply to its state."""
        try:
            state = next_state(UPDATE, update.state, signal)
        except ProtocolError:
            self.counters["stale"] += 1
            return False
        if state is not update.state:
            update.state = state
            update.entered[state] = now
        return True

    def _on_ready(self, event: NodeReady, participation: Participation, now: float) -> None:
        update = self._current(event.attempt, participation.peer.node)
        if update is None or not self._step(update, NodeReady, now):
            return
        self._effects.append(Record(event))
        update.ready.add(participation.peer.node)
        if not update.waiting_for and self._step(update, EveryoneReady, now):
            timeout = self.timeouts.transfer_of(update.manifest.nbytes)
            update.deadline = now + timeout
            self._effects.append(Publish(TransferStarted(update.attempt, update.audience, timeout)))

    def _on_refused(self, event: NodeRefused, participation: Participation, now: float) -> None:
        update = self._current(event.attempt, participation.peer.node)
        if update is None:
            return
        self._effects.append(Record(event))
        if event.reason is Reason.NOT_IN_VIEW:
            self._break_view(update, participation.peer.node, event.detail, now)
        else:
            self._abort(update, NodeRefused, participation.peer.node, event.reason, event.detail, now)

    def _on_received(self, event: AdapterReceived, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = self._current(event.attempt, node)
        if update is None or not self._step(update, AdapterReceived, now):
            return
        self._effects.append(Record(event))
        if event.digest != update.manifest.digest:
            detail = f"received {event.digest}, the manifest says {update.manifest.digest}"
            self._abort(update, LoadFailed, node, Reason.DIGEST_MISMATCH, detail, now)
            return
        update.received[node] = event.seconds
        if not update.waiting_for and self._step(update, EveryoneReceived, now):
            update.deadline = now + self.timeouts.load
            self._commit_if_loaded(update, now)

    def _on_transfer_failed(self, event: TransferFailed, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = next((u for u in self._active.values() if u.attempt == event.attempt), None)
        if update is None or (node != update.source and node not in update.audience):
            self.counters["stale"] += 1
            return
        self._effects.append(Record(event))
        self._break_view(update, node, event.detail, now)

    def _on_loaded(self, event: AdapterLoaded, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = self._current(event.attempt, node)
        if update is None or not self._step(update, AdapterLoaded, now):
            return
        self._effects.append(Record(event))
        if event.digest != update.manifest.digest:
            detail = f"loaded {event.digest}, the manifest says {update.manifest.digest}"
            self._abort(update, LoadFailed, node, Reason.DIGEST_MISMATCH, detail, now)
        elif not event.matched == event.total == update.manifest.tensors:
            detail = f"{event.matched} of {update.manifest.tensors} tensors found their module"
            self._abort(update, LoadFailed, node, Reason.MODULES_UNMATCHED, detail, now)
        else:
            update.loaded[node] = event.seconds
            self._commit_if_loaded(update, now)

    def _commit_if_loaded(self, update: Update, now: float) -> None:
        if update.state is not UpdateState.LOADING or update.waiting_for:
            return
        if not self._step(update, EveryoneLoaded, now):
            return
        update.deadline = now + self.timeouts.activate
        committed = VersionCommitted(update.attempt, update.manifest.digest)
        if update.targets:
            # The version is the head already: only those who catch up need to hear of it.
            self._effects += [Send(self.members[node].peer, committed) for node in update.audience]
            return
        self.heads[update.adapter] = Head(update.attempt, update.manifest)
        self.members[update.source].note_served(self.heads[update.adapter].served)
        self._effects.append(Publish(committed))

    def _on_load_failed(self, event: LoadFailed, participation: Participation, now: float) -> None:
        update = self._current(event.attempt, participation.peer.node)
        if update is None:
            return
        self._effects.append(Record(event))
        self._abort(update, LoadFailed, participation.peer.node, event.reason, event.detail, now)

    def _on_activated(self, event: VersionActivated, participation: Participation, now: float) -> None:
        node = participation.peer.node
        participation.note_served(Served(event.attempt.adapter, event.attempt.version, event.digest))
        update = self._current(event.attempt, node)
        if update is None or not self._step(update, VersionActivated, now):
            return
        self._effects.append(Record(event))
        update.activated.add(node)
        if not update.waiting_for:
            self._complete(update, EveryoneActivated, now)

    def _on_retired(self, event: VersionRetired, participation: Participation, now: float) -> None:
        self._effects.append(Record(event))

    # ------------------------------------------------------------------------------------ endings

    def _complete(self, update: Update, signal: Signal, now: float) -> None:
        late = update.waiting_for
        if not self._step(update, signal, now):
            return
        self._active.pop(update.source, None)
        outcomes = update.outcomes(late)
        for node in self.members.following(Role.ROLLOUT) if not update.targets else ():
            if node.wants(update.adapter) and node.peer.node not in outcomes:
                detail = "was not in the group yet; catches up next"
                outcomes[node.peer.node] = NodeOutcome(node.peer.node, Outcome.LATE, Phase.QUEUE, detail)
        completed = UpdateCompleted(
            update.attempt,
            update.request,
            update.manifest.digest,
            update.phase_times(now),
            tuple(outcomes[node] for node in sorted(outcomes)),
        )
        self._effects.append(Publish(completed))
        if not update.targets:
            self.completed.append(completed)
            self._ended[update.adapter] = completed

    def _miss_deadline(self, update: Update, now: float) -> None:
        culprits = ", ".join(update.waiting_for)
        if update.state is UpdateState.QUEUED:
            self._abort_queued(update, now)
            return
        detail = f"no answer from {culprits} in {now - update.entered[update.state]:.1f} s"
        self._abort(update, DeadlinePassed, culprits, Reason.DEADLINE_PASSED, detail, now)

    def _abort_queued(self, update: Update, now: float) -> None:
        if update.lost:
            lost = list(update.lost.values())[-1]
            self._abort(update, DeadlinePassed, lost.node, Reason.NODE_LOST, f"{lost.detail}; no node is left", now)
        else:
            detail = f"no rollout node was ready to follow within {now - update.requested_at:.0f} s"
            self._abort(update, DeadlinePassed, "", Reason.NO_NODES, detail, now)

    def _lose_node(self, update: Update, node: str, detail: str, now: float) -> None:
        """A member of the audience is gone: before the commit that costs the attempt, after it only the node."""
        phase = update.phase
        if not self._step(update, NodeLost, now):
            return
        update.lost[node] = NodeOutcome(node, Outcome.LOST, phase, detail)
        if update.state is UpdateState.COMMITTED:
            if not update.waiting_for:
                self._complete(update, EveryoneActivated, now)
        else:
            self._retry(update, phase, node, Reason.NODE_LOST, detail, now)

    def _break_view(self, update: Update, node: str, detail: str, now: float) -> None:
        phase = update.phase
        if not self._step(update, ViewBroken, now):
            return
        self._retry(update, phase, node, Reason.GROUP_BROKEN, detail, now)

    def _retry(self, update: Update, phase: Phase, node: str, reason: Reason, detail: str, now: float) -> None:
        """End the attempt and put the update back in line for the next view."""
        self._active.pop(update.source, None)
        self._give_view_up(update, node, detail, now)
        exhausted = reason is Reason.GROUP_BROKEN and update.number >= self.timeouts.attempts
        final = not update.targets and exhausted and self._step(update, AttemptsExhausted, now)
        self._publish_abort(update, phase, node, reason, detail, final, now)
        if not final and not update.targets:
            self._queues.setdefault(update.source, deque()).appendleft(update)

    def _abort(self, update: Update, signal: Signal, node: str, reason: Reason, detail: str, now: float) -> None:
        """End the update for good: its number is burned, every node keeps what it serves."""
        phase = update.phase
        if not self._step(update, signal, now):
            return
        self._active.pop(update.source, None)
        queue = self._queues.get(update.source)
        if queue is not None and update in queue:
            queue.remove(update)
        if phase is Phase.TRANSFER:
            self._give_view_up(update, node, detail, now)
        if update.version:
            self._publish_abort(update, phase, node, reason, detail, not update.targets, now)
        elif (trainer := self.members.get(update.source)) is not None:
            refused = PublishRefused(trainer.peer, update.request, update.adapter, node, reason, detail)
            self._effects += [Record(refused), Send(trainer.peer, refused)]

    def _publish_abort(
        self, update: Update, phase: Phase, node: str, reason: Reason, detail: str, final: bool, now: float
    ) -> None:
        aborted = UpdateAborted(
            update.attempt, phase, node, reason, detail, final=final, seconds=now - update.requested_at
        )
        self._effects.append(Publish(aborted))
        if final:
            self._ended[update.adapter] = aborted
        for participation in filter(None, map(self.members.get, update.targets)):
            self._catch_up_at[participation.peer, update.adapter] = now + CATCH_UP_PAUSE

    def _give_view_up(self, update: Update, node: str, detail: str, now: float) -> None:
        """A collective that somebody is still inside cannot be used for anything else."""
        view = self._views.numbered(update.view)
        if view is not None:
            self._effects += self._views.abandon(view, ViewBroken, {node}, detail, now)

    # ------------------------------------------------------------------------------------- status

    def _on_status(self, event: StatusRequested, participation: Participation, now: float) -> None:
        nodes = tuple(
            NodeStatus(
                p.peer, p.role, p.following, now - p.heard_at, tuple(p.served.values()), p.adapters, p.capabilities
            )
            for p in sorted(self.members, key=lambda p: (p.role, p.peer.node))
            if p.role is not Role.OBSERVER
        )
        updates = tuple(
            UpdateStatus(u.attempt, u.phase, now - u.requested_at, tuple(u.waiting_for)) for u in self._updates()
        )
        report = StatusReported(
            0,
            nodes,
            tuple(head.served for head in self.heads.values()),
            updates,
            tuple(self.completed)[-10:],
            tuple(sorted(self.counters.items())),
        )
        self._effects.append(Send(participation.peer, report))
