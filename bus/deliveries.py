"""The deliveries of a fleet: each update from its place in the queue to its end. Pure; a part of the coordinator.

At most one update of a source is on its way at a time (I5). What waits longest goes next; a head is brought to
nodes that lack it when nothing waits. See the `UPDATE` table in `protocol.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Final

from bus.errors import ProtocolError
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    LoadFailed,
    NodeLost,
    NodeOutcome,
    NodeReady,
    NodeRefused,
    Outcome,
    Peer,
    Phase,
    PhaseTimes,
    Policy,
    PublishRefused,
    Reason,
    Role,
    Served,
    TransferFailed,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    UpdateCompleted,
    VersionActivated,
    VersionCommitted,
    VersionRetired,
)
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
    NodeLeftOut,
    Publish,
    Record,
    Send,
    Signal,
    SourceLost,
    Timeouts,
    UpdateState,
    ViewBroken,
    next_state,
)
from bus.update import Head, Update
from bus.view import View, Views

COMPLETED_KEPT: Final = 50
"""How many finished updates `status` can show."""

CATCH_UP_PAUSE: Final = 10.0
"""Seconds before a node that failed to take a version is tried again."""

MAX_QUEUED: Final = 16
"""How many publishes of one source may wait."""

REQUESTS_REMEMBERED: Final = 256
"""How many finished publishes are still known by their request, should a trainer ask again."""


class Deliveries:
    """Every update that waits, is on its way, or has just ended; what it asks for goes into `effects`."""

    def __init__(
        self,
        members: Membership,
        views: Views,
        timeouts: Timeouts,
        effects: list[Effect],
        counters: Counter[str],
    ) -> None:
        self.heads: dict[str, Head] = {}
        self.completed: deque[UpdateCompleted] = deque(maxlen=COMPLETED_KEPT)
        self.counters = counters
        self._members = members
        self._views = views
        self._timeouts = timeouts
        self._effects = effects
        self._newest: Counter[str] = Counter()
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._queues: dict[str, deque[Update]] = {}
        self._active: dict[str, Update] = {}
        self._ended: dict[str, UpdateCompleted | UpdateAborted] = {}
        self._by_request: OrderedDict[str, UpdateCompleted] = OrderedDict()
        self._catch_up_at: dict[tuple[Peer, str], float] = {}
        self._lost_between: dict[str, dict[str, NodeOutcome]] = {}
        """By adapter, the nodes lost since its last update ended: the next one says so, though it never met them."""
        self._restored: dict[tuple[str, int], UpdateAnnounced] = {}
        self._unfinished: dict[tuple[str, int], UpdateAnnounced] = {}

    def __repr__(self) -> str:
        return f"<Deliveries heads={self.heads} active={self._active} queued={self._queues}>"

    def updates(self) -> list[Update]:
        """Those on their way, then those that wait."""
        return [*self._active.values(), *(update for queue in self._queues.values() for update in queue)]

    def is_busy(self, source: str) -> bool:
        """Whether an update of this source is on its way, so that its view must stay as it is."""
        return source in self._active

    def admit(self, update: Update, trainer: Peer, *, supersede: bool) -> None:
        """Put a publish in line; told twice it is one, and one that was committed before is told its end again."""
        if (completed := self._by_request.get(update.request)) is not None:
            self._effects.append(Send(trainer, completed))
            return
        if any(known.request == update.request for known in self.updates()):
            self.counters["duplicate"] += 1
            return
        queue = self._queues.setdefault(update.source, deque())
        if supersede:
            # One that has a number was announced, and is only waiting for its next view.
            for older in [one for one in queue if one.adapter == update.adapter and not one.version]:
                queue.remove(older)
                self.refuse(older, trainer, "", Reason.SUPERSEDED, "a newer publish took its place in the queue")
        if len(queue) >= MAX_QUEUED:
            detail = f"{len(queue)} publishes wait already; wait for one, or publish with supersede"
            self.refuse(update, trainer, "", Reason.QUEUE_FULL, detail)
            return
        queue.append(update)

    def refuse(self, update: Update, trainer: Peer, node: str, reason: Reason, detail: str) -> None:
        """End a publish that got no number."""
        refused = PublishRefused(trainer, update.request, update.adapter, node, reason, detail)
        self._effects += [Record(refused), Send(trainer, refused)]

    def note_served(self, served: Served) -> None:
        """A node has seen this number, under whatever journal: new numbers start above it."""
        self._newest[served.adapter] = max(self._newest[served.adapter], served.version)

    # --------------------------------------------------------------------------------------- time

    def handle_time(self, now: float) -> None:
        """End what has run out of time."""
        for update in [update for update in self.updates() if update.due <= now]:
            if update.state is UpdateState.COMMITTED:
                self._complete(update, DeadlinePassed, now)
            else:
                self._miss_deadline(update, now)
        for key in [key for key, at in self._catch_up_at.items() if at <= now]:
            del self._catch_up_at[key]

    def deadlines(self) -> list[float]:
        return [*(update.due for update in self.updates()), *self._catch_up_at.values()]

    # ------------------------------------------------------------------------------------ restart

    def restore(self, event: Event) -> None:
        """Take up one event of a journal."""
        match event:
            case UpdateAnnounced(attempt=attempt):
                key = (attempt.adapter, attempt.version)
                self._newest[attempt.adapter] = max(self._newest[attempt.adapter], attempt.version)
                self._attempts[key] = max(self._attempts[key], attempt.number)
                if not event.catch_up:
                    self._restored[key] = event
            case VersionCommitted(attempt=attempt):
                announced = self._restored.pop((attempt.adapter, attempt.version))
                self._unfinished[attempt.adapter, attempt.version] = announced
                self.heads[attempt.adapter] = Head(attempt, announced.manifest)
            case UpdateAborted(attempt=attempt, final=True):
                self._restored.pop((attempt.adapter, attempt.version), None)
            case UpdateCompleted(attempt=attempt, request=request) if request:
                self._unfinished.pop((attempt.adapter, attempt.version), None)
                self._note_completed(event)

    def finish_restored(self) -> None:
        """The journal ends here: what was in flight is over, its number burned; what was committed is complete."""
        detail = "the controller restarted before the version was committed"
        for event in self._restored.values():
            aborted = UpdateAborted(
                event.attempt, Phase.QUEUE, "", Reason.CONTROLLER_RESTARTED, detail, final=True, seconds=0.0
            )
            self._effects.append(Publish(aborted))
        for event in self._unfinished.values():
            untimed = PhaseTimes(0.0, 0.0, 0.0, 0.0, 0.0)
            completed = UpdateCompleted(event.attempt, event.request, event.manifest.digest, untimed, ())
            self._effects.append(Publish(completed))
            self._note_completed(completed)
        self._restored.clear()
        self._unfinished.clear()

    def _note_completed(self, completed: UpdateCompleted) -> None:
        self.completed.append(completed)
        self._ended[completed.attempt.adapter] = completed
        self._by_request[completed.request] = completed
        while len(self._by_request) > REQUESTS_REMEMBERED:
            self._by_request.popitem(last=False)

    def snapshot(self, participation: Participation) -> None:
        """Tell a peer, by the events that made it, what is current and what it has a part in."""
        peer = participation.peer
        told: list[Event] = [VersionCommitted(head.attempt, head.manifest.digest) for head in self.heads.values()]
        for update in self._active.values():
            if peer.node == update.source or peer.node in update.audience:
                told.append(self._announcement(update))
                if update.state is UpdateState.TRANSFERRING:
                    told.append(self._start_of_transfer(update))
        if participation.role is Role.TRAINER:
            told += [self._ended[adapter] for adapter in participation.adapters if adapter in self._ended]
        self._effects += [Send(peer, event) for event in told]

    # -------------------------------------------------------------------------------------- losses

    def note_lost(self, participation: Participation, detail: str) -> None:
        """A rollout node is gone without a word; the next publish of each adapter that it followed is told."""
        node = participation.peer.node
        for adapter in filter(participation.wants, self.heads):
            self._lost_between.setdefault(adapter, {})[node] = NodeOutcome(node, Outcome.LOST, Phase.QUEUE, detail)

    def lose(self, participation: Participation, detail: str, now: float) -> None:
        """A peer is gone: as a receiver it costs an attempt, as the source all its updates."""
        node = participation.peer.node
        for update in [update for update in self._active.values() if node in update.audience]:
            self._lose_node(update, node, detail, now)
        for update in [update for queue in self._queues.values() for update in queue if node in update.participants]:
            # Its death showed first as a broken group: the update waits for the next view already.
            update.left_out[node] = NodeOutcome(node, Outcome.LOST, update.broken_in, detail)
        if participation.role is Role.TRAINER:
            for update in [u for u in self.updates() if u.source == node and u.state is not UpdateState.COMMITTED]:
                self._abort(update, SourceLost, node, Reason.SOURCE_LOST, f"the trainer {detail}", now)

    # --------------------------------------------------------------------------------------- starts

    def start_next(self, trainer: Participation, view: View, now: float) -> None:
        """Announce what waits for this view: a publish first, else the head to nodes that lack it."""
        queue = self._queues.get(trainer.peer.node)
        update = queue.popleft() if queue else self._catch_up(trainer, view, now)
        if update is None:
            return
        followers = (self._members[node] for node in sorted(view.nodes - {trainer.peer.node}))
        audience = tuple(node.peer.node for node in followers if node.wants(update.adapter))
        if update.targets:
            audience = update.targets
        if not audience or len(audience) < update.quorum:
            self._queues[trainer.peer.node].appendleft(update)
            return
        if not update.version:
            self._newest[update.adapter] += 1
            update.version = self._newest[update.adapter]
        self._step(update, UpdateAnnounced, now)
        update.number = self._attempts[update.adapter, update.version]
        update.begin_attempt(view.proposal.view, audience, now + self._timeouts.ready)
        self._attempts[update.adapter, update.version] = update.number
        self._active[trainer.peer.node] = update
        self._effects.append(Publish(self._announcement(update)))

    def _announcement(self, update: Update) -> UpdateAnnounced:
        return UpdateAnnounced(
            update.attempt,
            update.request,
            update.source,
            update.audience,
            update.manifest,
            self._timeouts.ready,
            catch_up=bool(update.targets),
        )

    def _catch_up(self, trainer: Participation, view: View, now: float) -> Update | None:
        for adapter in trainer.adapters:
            head = self.heads.get(adapter)
            if head is None or trainer.served.get(adapter) != head.served:
                continue
            nodes = (self._members[node] for node in sorted(view.nodes - {trainer.peer.node}))
            lagging = tuple(
                node.peer.node
                for node in nodes
                if node.wants(adapter)
                and (node.peer, adapter) not in self._catch_up_at
                and (node.served[adapter].version if adapter in node.served else 0) < head.attempt.version
            )
            if lagging:
                # One of them that cannot take it must not keep the others from it.
                update = Update(
                    "",
                    adapter,
                    trainer.peer.node,
                    head.manifest,
                    now,
                    now + self._timeouts.publish,
                    Policy.QUORUM,
                    1,
                    lagging,
                )
                update.version = head.attempt.version
                return update
        return None

    # -------------------------------------------------------------------------- the life of an update

    def _current(self, attempt: Attempt, node: str) -> Update | None:
        """The update in flight that an answer belongs to; an answer for any other attempt is stale."""
        for update in self._active.values():
            if update.attempt == attempt and node in update.participants:
                return update
        self.counters["stale"] += 1
        return None

    def _accept(
        self, event: NodeReady | AdapterReceived | AdapterLoaded | VersionActivated, node: str, now: float
    ) -> Update | None:
        """Journal a node's yes, and give the update that it moves; None, and counted, for one that is stale."""
        update = self._current(event.attempt, node)
        if update is None or not self._step(update, type(event), now):
            return None
        self._effects.append(Record(event))
        return update

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

    def _advance(self, update: Update, now: float) -> None:
        """Take the step that is due once nobody is waited for."""
        if update.waiting_for:
            return
        match update.state:
            case UpdateState.ANNOUNCED if self._step(update, EveryoneReady, now):
                update.deadline = now + self._timeouts.transfer_of(update.manifest.nbytes)
                self._effects.append(Publish(self._start_of_transfer(update)))
            case UpdateState.TRANSFERRING if self._step(update, EveryoneReceived, now):
                update.deadline = now + self._timeouts.load
                self._advance(update, now)
            case UpdateState.LOADING if self._step(update, EveryoneLoaded, now):
                update.deadline = now + self._timeouts.activate
                self._commit(update)
            case UpdateState.COMMITTED:
                self._complete(update, EveryoneActivated, now)

    def _start_of_transfer(self, update: Update) -> TransferStarted:
        timeout = self._timeouts.transfer_of(update.manifest.nbytes)
        return TransferStarted(update.attempt, update.participants, timeout)

    def _commit(self, update: Update) -> None:
        committed = VersionCommitted(update.attempt, update.manifest.digest)
        if update.targets:
            # The version is the head already: only those who catch up need to hear of it.
            self._effects += [Send(self._members[node].peer, committed) for node in update.participants]
            return
        self.heads[update.adapter] = Head(update.attempt, update.manifest)
        self._members[update.source].note_served(self.heads[update.adapter].served)
        self._effects.append(Publish(committed))

    def on_ready(self, event: NodeReady, participation: Participation, now: float) -> None:
        update = self._accept(event, participation.peer.node, now)
        if update is None:
            return
        update.ready.add(participation.peer.node)
        self._advance(update, now)

    def on_refused(self, event: NodeRefused, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = self._current(event.attempt, node)
        if update is None:
            return
        self._effects.append(Record(event))
        if event.reason is Reason.NOT_IN_VIEW:
            self._break_view(update, node, event.detail, now)
        elif not self._leave_out(update, Phase.READY, node, Outcome.REFUSED, event.detail, now):
            self._abort(update, NodeRefused, node, event.reason, event.detail, now)

    def on_received(self, event: AdapterReceived, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = self._accept(event, node, now)
        if update is None:
            return
        if event.digest != update.manifest.digest:
            detail = f"received {event.digest}, the manifest says {update.manifest.digest}"
            self._fail_load(update, Phase.TRANSFER, node, Reason.DIGEST_MISMATCH, detail, now)
            return
        update.received[node] = event.seconds
        self._advance(update, now)

    def on_transfer_failed(self, event: TransferFailed, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = next((u for u in self._active.values() if u.attempt == event.attempt), None)
        if update is None or (node != update.source and node not in update.participants):
            self.counters["stale"] += 1
            return
        self._effects.append(Record(event))
        self._break_view(update, node, event.detail, now)

    def on_loaded(self, event: AdapterLoaded, participation: Participation, now: float) -> None:
        node = participation.peer.node
        update = self._accept(event, node, now)
        if update is None:
            return
        if event.digest != update.manifest.digest:
            detail = f"loaded {event.digest}, the manifest says {update.manifest.digest}"
            self._fail_load(update, Phase.LOAD, node, Reason.DIGEST_MISMATCH, detail, now)
        elif not event.matched == event.total == update.manifest.tensors:
            detail = f"{event.matched} of {update.manifest.tensors} tensors found their module"
            self._fail_load(update, Phase.LOAD, node, Reason.MODULES_UNMATCHED, detail, now)
        else:
            update.loaded[node] = event.seconds
            self._advance(update, now)

    def on_load_failed(self, event: LoadFailed, participation: Participation, now: float) -> None:
        update = self._current(event.attempt, participation.peer.node)
        if update is None:
            return
        self._effects.append(Record(event))
        self._fail_load(update, Phase.LOAD, participation.peer.node, event.reason, event.detail, now)

    def _fail_load(self, update: Update, phase: Phase, node: str, reason: Reason, detail: str, now: float) -> None:
        if not self._leave_out(update, phase, node, Outcome.FAILED, detail, now):
            self._abort(update, LoadFailed, node, reason, detail, now, phase)

    def on_activated(self, event: VersionActivated, participation: Participation, now: float) -> None:
        node = participation.peer.node
        participation.note_served(Served(event.attempt.adapter, event.attempt.version, event.digest))
        update = self._accept(event, node, now)
        if update is None:
            return
        update.activated.add(node)
        self._advance(update, now)

    def on_retired(self, event: VersionRetired, participation: Participation, now: float) -> None:
        self._effects.append(Record(event))

    # ------------------------------------------------------------------------------------ endings

    def _complete(self, update: Update, signal: Signal, now: float) -> None:
        late = update.waiting_for
        if not self._step(update, signal, now):
            return
        self._leave_active(update)
        outcomes = update.outcomes(late)
        for node in self._members.following(Role.ROLLOUT) if not update.targets else ():
            if node.wants(update.adapter) and node.peer.node not in outcomes:
                detail = "was not in the group yet; catches up next"
                outcomes[node.peer.node] = NodeOutcome(node.peer.node, Outcome.LATE, Phase.QUEUE, detail)
        if not update.targets:
            lost = self._lost_between.pop(update.adapter, {})
            outcomes = {node: end for node, end in lost.items() if self._members.get(node) is None} | outcomes
        completed = UpdateCompleted(
            update.attempt,
            update.request,
            update.manifest.digest,
            update.phase_times(now),
            tuple(outcomes[node] for node in sorted(outcomes)),
        )
        self._effects.append(Publish(completed))
        failed = [node for node, outcome in update.left_out.items() if outcome.outcome is not Outcome.LOST]
        self._pause_catch_up(update.adapter, failed, now)
        if not update.targets:
            self._note_completed(completed)

    def _leave_active(self, update: Update) -> None:
        """The next of its source may go; one that only waited in the queue holds nobody up."""
        if self._active.get(update.source) is update:
            del self._active[update.source]

    def _pause_catch_up(self, adapter: str, nodes: Collection[str], now: float) -> None:
        """Nodes that just failed to take a version are given a while before they are asked again."""
        for participation in filter(None, map(self._members.get, nodes)):
            self._catch_up_at[participation.peer, adapter] = now + CATCH_UP_PAUSE

    def _miss_deadline(self, update: Update, now: float) -> None:
        if update.state is UpdateState.QUEUED:
            self._abort_queued(update, now)
            return
        late = update.waiting_for
        detail = f"no answer from {', '.join(late)} in {now - update.entered[update.state]:.1f} s"
        if now < update.expires_at and update.can_do_without(late):
            if update.state is UpdateState.TRANSFERRING:
                self._give_view_up(update, late[0], detail, now)
            for node in late:
                self._leave_out(update, update.phase, node, Outcome.LATE, detail, now)
        else:
            self._abort(update, DeadlinePassed, ", ".join(late), Reason.DEADLINE_PASSED, detail, now)

    def _leave_out(self, update: Update, phase: Phase, node: str, outcome: Outcome, detail: str, now: float) -> bool:
        """Go on without a node, if the policy and the number of the others allow it."""
        if not update.can_do_without([node]) or not self._step(update, NodeLeftOut, now):
            return False
        update.left_out[node] = NodeOutcome(node, outcome, phase, detail)
        self._advance(update, now)
        return True

    def _abort_queued(self, update: Update, now: float) -> None:
        lost = [outcome for outcome in update.left_out.values() if outcome.outcome is Outcome.LOST]
        if lost:
            detail = f"{lost[-1].detail}; no node is left"
            self._abort(update, DeadlinePassed, lost[-1].node, Reason.NODE_LOST, detail, now)
        elif (ahead := self._active.get(update.source)) is not None:
            detail = f"it waited behind {ahead.attempt} for {now - update.requested_at:.0f} s"
            self._abort(update, DeadlinePassed, "", Reason.DEADLINE_PASSED, detail, now)
        else:
            needed = f"{update.quorum} rollout nodes were" if update.quorum > 1 else "no rollout node was"
            missing = "not " if update.quorum > 1 else ""
            detail = f"{needed} {missing}ready to follow within {now - update.requested_at:.0f} s"
            self._abort(update, DeadlinePassed, "", Reason.NO_NODES, detail, now)

    def _lose_node(self, update: Update, node: str, detail: str, now: float) -> None:
        """A member of the audience is gone: before the commit that costs the attempt, after it only the node."""
        phase = update.phase
        if not self._step(update, NodeLost, now):
            return
        update.left_out[node] = NodeOutcome(node, Outcome.LOST, phase, detail)
        if update.state is UpdateState.COMMITTED:
            self._advance(update, now)
        else:
            self._retry(update, phase, node, Reason.NODE_LOST, detail, now)

    def _break_view(self, update: Update, node: str, detail: str, now: float) -> None:
        phase = update.phase
        if not self._step(update, ViewBroken, now):
            return
        self._retry(update, phase, node, Reason.GROUP_BROKEN, detail, now)

    def _retry(self, update: Update, phase: Phase, node: str, reason: Reason, detail: str, now: float) -> None:
        """End the attempt and put the update back in line for the next view."""
        update.broken_in = phase
        self._leave_active(update)
        self._give_view_up(update, node, detail, now)
        exhausted = reason is Reason.GROUP_BROKEN and update.number >= self._timeouts.attempts
        final = not update.targets and exhausted and self._step(update, AttemptsExhausted, now)
        self._publish_abort(update, phase, node, reason, detail, final, now)
        if not final and not update.targets:
            self._queues.setdefault(update.source, deque()).appendleft(update)

    def _abort(
        self,
        update: Update,
        signal: Signal,
        node: str,
        reason: Reason,
        detail: str,
        now: float,
        phase: Phase | None = None,
    ) -> None:
        """End the update for good: its number is burned, every node keeps what it serves.

        `phase` is the culprit's own, where that is not the fleet's: one node may load while another receives.
        """
        phase = phase or update.phase
        was_transferring = update.state is UpdateState.TRANSFERRING
        if not self._step(update, signal, now):
            return
        self._leave_active(update)
        queue = self._queues.get(update.source)
        if queue is not None and update in queue:
            queue.remove(update)
        if was_transferring:
            self._give_view_up(update, node, detail, now)
        if update.version:
            self._publish_abort(update, phase, node, reason, detail, not update.targets, now)
        elif (trainer := self._members.get(update.source)) is not None:
            self.refuse(update, trainer.peer, node, reason, detail)

    def _publish_abort(
        self, update: Update, phase: Phase, node: str, reason: Reason, detail: str, final: bool, now: float
    ) -> None:
        aborted = UpdateAborted(
            update.attempt, phase, node, reason, detail, final=final, seconds=now - update.requested_at
        )
        self._effects.append(Publish(aborted))
        if final:
            self._ended[update.adapter] = aborted
        if reason not in (Reason.NODE_LOST, Reason.SOURCE_LOST):
            self._pause_catch_up(update.adapter, update.targets, now)

    def _give_view_up(self, update: Update, node: str, detail: str, now: float) -> None:
        """A collective that somebody is still inside cannot be used for anything else."""
        view = self._views.numbered(update.view)
        if view is not None:
            self._effects += self._views.abandon(view, ViewBroken, {node}, detail, now)
