"""A trainer, simulated: the real `Source`, with `trainer_node.session`'s shell around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bus import errors
from bus.client import Joined
from bus.events import (
    Event,
    JoinRequested,
    LayoutDeclared,
    Policy,
    PublishRequested,
    Served,
    TransferFailed,
    UpdateCompleted,
)
from bus.manifest import AdapterLayout, AdapterManifest
from bus.participant import Source
from bus.protocol import Answer, Discard, Effect, JoinGroup, LeaveGroup, Resolve, Timeouts, Transmit
from tools.simulation.collective import Collective
from tools.simulation.invariants import Invariants
from tools.simulation.network import Network
from tools.simulation.peer import PeerProcess
from tools.simulation.world import Lane, Steps, World


@dataclass(slots=True)
class Pending:
    """A publish that waits for its end; `ended` is called with it, or with None if nobody answered."""

    request: PublishRequested
    ended: Callable[[Event | None], None]


class TrainerProcess(PeerProcess):
    """The trainer of one adapter; a payload is its own digest, as in `collective.py`."""

    def __init__(
        self,
        world: World,
        network: Network,
        collective: Collective,
        invariants: Invariants,
        join: JoinRequested,
        layout: AdapterLayout,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(world, network, collective, invariants, join, timeouts.lease + timeouts.heartbeat)
        (self.adapter,) = join.adapters
        self.layout = layout
        self.head: Served | None = None
        """The version whose bytes this trainer holds for nodes that lack it."""
        self.pending: dict[str, Pending] = {}
        self._source = Source(join.peer)
        self._transfers = Lane(self)

    def served(self) -> tuple[Served, ...]:
        return (self.head,) if self.head is not None else ()

    # --------------------------------------------------------------------------------------- requests

    def publish(
        self,
        request: str,
        content: str,
        timeout: float,
        ended: Callable[[Event | None], None],
        *,
        policy: Policy = Policy.STRICT,
        quorum: int = 0,
        supersede: bool = False,
    ) -> None:
        """Bring a payload to every live node; `ended` hears how it went, within the timeout and a lease."""
        manifest = AdapterManifest.of(self.layout, content)
        event = PublishRequested(self.peer, request, self.adapter, manifest, timeout, policy, quorum, supersede)
        self.invariants.requested(event)
        self.pending[request] = pending = Pending(event, ended)
        self._request(pending)
        self.after(timeout + self._welcome.lease, self._give_up, request)

    def _give_up(self, request: str) -> None:
        pending = self.pending.pop(request, None)
        if pending is not None:
            self._transfers.interrupt()
            pending.ended(None)

    def _request(self, pending: Pending) -> None:
        self.send(LayoutDeclared(self.layout.digest, self.layout.body))
        self.send(pending.request)

    def _resolve(self, request: str, event: Event) -> None:
        pending = self.pending.pop(request, None)
        if pending is None:
            return
        if isinstance(event, UpdateCompleted):
            self.head = Served(event.attempt.adapter, event.attempt.version, event.digest)
        self.invariants.resolved(pending.request, event)
        pending.ended(event)

    # ---------------------------------------------------------------------------------------- events

    def take(self, event: Event | Joined) -> None:
        if isinstance(event, Joined):
            self._perform(self._source.reset())
            for pending in self.pending.values():
                self._request(pending)
        else:
            self._perform(self._source.handle(event))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(event):
                    self.send(event)
                case JoinGroup() | LeaveGroup():
                    self.perform_group(effect)
                case Transmit():
                    self._transfers.add(partial(self._transmit, effect))
                case Discard():
                    self._transfers.interrupt()
                case Resolve(request, event):
                    self._resolve(request, event)

    # ------------------------------------------------------------------------------------- data plane

    def _transmit(self, effect: Transmit) -> Steps:
        attempt, digest = effect.started.attempt, effect.update.manifest.digest
        held = [pending.request.manifest.digest for pending in self.pending.values()]
        if digest not in [*held, *(served.digest for served in self.served())]:
            self.take(TransferFailed(attempt, self.peer, "the trainer no longer holds these bytes"))
            return
        try:
            yield from self.collective.transfer(self, effect.proposal, effect.started, digest)
        except errors.TransferFailed as error:
            self.take(TransferFailed(attempt, self.peer, error.problem))
