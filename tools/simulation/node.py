"""A rollout node, simulated: the real `Participant`, with `bus.follower`'s shell around it, on a modelled engine."""

from __future__ import annotations

from functools import partial

from bus import errors
from bus.client import Joined
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    JoinRequested,
    LoadFailed,
    NodeReady,
    NodeRefused,
    Reason,
    Served,
    TransferFailed,
    TransferStarted,
    UpdateAnnounced,
    VersionActivated,
    VersionRetired,
    ViewProposed,
)
from bus.manifest import AdapterLayout
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
from tools.simulation.collective import Collective
from tools.simulation.engine import ModelledEngine, Request
from tools.simulation.faults import Plan
from tools.simulation.invariants import Invariants
from tools.simulation.network import Network
from tools.simulation.peer import PeerProcess, within
from tools.simulation.world import Lane, Steps, World

REQUEST_EVERY = (0.5, 4.0)
REQUEST_TAKES = (0.05, 2.5)


class NodeProcess(PeerProcess):
    """One inference server that follows the bus and answers requests."""

    def __init__(
        self,
        world: World,
        network: Network,
        collective: Collective,
        invariants: Invariants,
        plan: Plan,
        join: JoinRequested,
        timeouts: Timeouts,
    ) -> None:
        assert join.capabilities is not None
        super().__init__(world, network, collective, invariants, join)
        self.participant = Participant(join.peer, join.adapters, timeouts)
        self.engine = ModelledEngine(join.capabilities, self.name, plan, self._report_retired)
        self._lanes: dict[str, Lane] = {}
        self._proposals: dict[int, ViewProposed] = {}
        self._wakes_at = float("inf")

    def start(self) -> None:
        super().start()
        self.after(self.world.rng.uniform(*REQUEST_EVERY), self._admit)

    def served(self) -> tuple[Served, ...]:
        return tuple(self.participant.served.values())

    def take(self, event: Event | Joined) -> None:
        if isinstance(event, Joined):
            self._perform(self.participant.reset())
        else:
            self._perform(self.participant.handle(event, self.clock))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(event):
                    self.send(event)
                case JoinGroup(proposal):
                    self._proposals[proposal.view] = proposal
                    self.perform_group(effect)
                case LeaveGroup(view):
                    self._proposals.pop(view, None)
                    self.perform_group(effect)
                case Prepare(update, layout):
                    self._lane(update.attempt).add(partial(self._prepare, update, layout))
                case Receive(started):
                    self._lane(started.attempt).add(partial(self._receive, started))
                case Load(attempt):
                    self._lane(attempt).add(partial(self._load, attempt))
                case Activate(attempt, digest):
                    self._lane(attempt).add(partial(self._activate, attempt, digest))
                case Discard(attempt):
                    self._lane(attempt).interrupt()
                    self._lane(attempt).add(partial(self._discard, attempt))
        if effects:
            self._set_alarm()

    def _lane(self, attempt: Attempt) -> Lane:
        if attempt.adapter not in self._lanes:
            self._lanes[attempt.adapter] = Lane(self)
        return self._lanes[attempt.adapter]

    def _set_alarm(self) -> None:
        deadline = self.participant.next_deadline()
        if deadline is not None and deadline < self._wakes_at:
            self._wakes_at = deadline
            self.sleep_until(deadline, self._wake, deadline)

    def _wake(self, alarm: float) -> None:
        if alarm == self._wakes_at:
            self._wakes_at = float("inf")
            self._perform(self.participant.handle_time(self.clock))
            self._set_alarm()

    # ----------------------------------------------------------------------------------------- steps

    def _prepare(self, update: UpdateAnnounced, layout: AdapterLayout) -> Steps:
        attempt = update.attempt
        try:
            yield from within(update.timeout, self.engine.prepare(update, layout))
        except errors.Refused as error:
            self.engine.discard(attempt)
            self.take(NodeRefused(attempt, self.peer, Reason(error.reason), error.detail))
        except (errors.LoadFailed, TimeoutError) as error:
            self.engine.discard(attempt)
            self.take(NodeRefused(attempt, self.peer, Reason.ENGINE_FAILED, f"preparing failed: {error!r}"))
        else:
            self.invariants.prepared(self.peer, attempt)
            self.take(NodeReady(attempt, self.peer))

    def _receive(self, started: TransferStarted) -> Steps:
        attempt = started.attempt
        proposal = self._proposals.get(attempt.view)
        try:
            content = yield from self.collective.transfer(self, proposal, started)
        except errors.TransferFailed as error:
            self.take(TransferFailed(attempt, self.peer, error.problem))
        else:
            self.engine.stage(attempt, content)
            self.take(AdapterReceived(attempt, self.peer, content, 0.0))

    def _load(self, attempt: Attempt) -> Steps:
        try:
            loaded = yield from within(self.participant.timeouts.load, self.engine.load(attempt))
        except errors.LoadFailed as error:
            self.take(LoadFailed(attempt, self.peer, Reason(error.reason), error.detail))
        except (errors.Refused, TimeoutError) as error:
            self.take(LoadFailed(attempt, self.peer, Reason.ENGINE_FAILED, f"loading failed: {error!r}"))
        else:
            self.invariants.loaded(self.peer, attempt, loaded.digest)
            self.invariants.serves(self)
            proof = (loaded.digest, loaded.matched, loaded.total, loaded.seconds)
            self.take(AdapterLoaded(attempt, self.peer, *proof))

    def _activate(self, attempt: Attempt, digest: str) -> Steps:
        try:
            yield from within(self.participant.timeouts.activate, self.engine.activate(attempt))
        except (errors.LoadFailed, errors.Refused, TimeoutError):
            return
        self.take(VersionActivated(attempt, self.peer, digest))
        self.invariants.serves(self)

    def _discard(self, attempt: Attempt) -> Steps:
        self.engine.discard(attempt)
        yield from ()

    def _report_retired(self, adapter: str, version: int) -> None:
        self.send(VersionRetired(adapter, version, self.peer))

    # -------------------------------------------------------------------------------------- requests

    def _admit(self) -> None:
        """A request comes for each adapter that has a name here."""
        for adapter in self.engine.alias:
            request = self.engine.admit(adapter)
            assert request is not None
            self.after(self.world.rng.uniform(*REQUEST_TAKES), self._answer, request)
        self.after(self.world.rng.uniform(*REQUEST_EVERY), self._admit)

    def _answer(self, request: Request) -> None:
        self.invariants.answered(self.peer, request.resident.attempt, request.content, self.engine.answer(request))
