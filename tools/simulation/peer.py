"""A peer's line to the controller, simulated: `bus.client`'s shell around the real `Hearing`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bus.client import JOIN_RETRY_SECONDS, Joined
from bus.errors import JoinFailed, RendezvousFailed
from bus.events import (
    Envelope,
    Event,
    JoinAccepted,
    JoinRefused,
    JoinRequested,
    NodeAlive,
    NodeLeft,
    Reason,
    Served,
    SnapshotRequested,
    ViewFailed,
    ViewJoined,
    ViewProposed,
)
from bus.hearing import Heard, Hearing
from bus.protocol import JoinGroup, LeaveGroup
from tools.simulation.collective import Collective
from tools.simulation.invariants import Invariants
from tools.simulation.network import Network, decoded, encoded
from tools.simulation.story import shown
from tools.simulation.world import Lane, Process, Steps, Waiting, World

T = TypeVar("T")

SUBSCRIBE_SECONDS = 0.05


class PeerProcess(Process):
    """A process on the bus: joins, hears, notices gaps and silence, joins again; a view's member as well."""

    def __init__(
        self,
        world: World,
        network: Network,
        collective: Collective,
        invariants: Invariants,
        join: JoinRequested,
        taken_patience: float = 0.0,
    ) -> None:
        super().__init__(world, f"{join.peer.node}#{join.peer.incarnation}")
        self.peer = join.peer
        self.node = join.peer.node
        self.refused: Reason | None = None
        """Why the controller turned this process out, if it did."""
        self.hearing: Hearing | None = None
        self.has_followed = False
        self.collective = collective
        self.invariants = invariants
        self._network = network
        self._join = join
        self._taken_patience = taken_patience
        self._asked_since = 0.0
        self._welcome = JoinAccepted(join.peer, "", JOIN_RETRY_SECONDS, 1.0, ())
        self._run = ""
        self._view_lanes: dict[int, Lane] = {}

    def start(self) -> None:
        self._network.connect(self)
        self._begin_to_join()

    def die(self) -> None:
        super().die()
        self._network.disconnect(self)
        self.collective.leave(self)

    def depart(self) -> None:
        """End by one's own will, with a word to the controller if it ever answered."""
        if self._run:
            self.send(NodeLeft(self.peer))
        self.die()

    # -------------------------------------------------------------------- what a kind of peer adds

    @abstractmethod
    def served(self) -> Iterable[Served]: ...

    @abstractmethod
    def take(self, event: Event | Joined) -> None:
        """What to do about an event, published or sent to this peer."""

    # ---------------------------------------------------------------------------------- connection

    def send(self, event: Event) -> None:
        if self.world.trace is not None:
            routine = isinstance(event, NodeAlive)
            self.world.note(self.name, f"says {shown(event)}", routine=routine)
        self._network.request(self, encoded(Envelope(self._run, 0, event)))

    def _begin_to_join(self) -> None:
        self.hearing, self._asked_since = None, self.clock
        self._ask_to_join(self.clock)

    def _ask_to_join(self, since: float) -> None:
        if self.hearing is None and self._asked_since == since:
            self.send(replace(self._join, served=tuple(self.served())))
            self.after(JOIN_RETRY_SECONDS, self._ask_to_join, since)

    def hear_answer(self, frame: bytes) -> None:
        envelope = decoded(frame)
        if self.hearing is None:
            match envelope.event:
                case JoinAccepted(peer=self.peer) as welcome:
                    self._join_run(envelope.run, welcome)
                case JoinRefused(reason=reason, detail=detail):
                    waited = self.clock - self._asked_since
                    if reason is not Reason.ADAPTER_TAKEN or waited > self._taken_patience:
                        self._be_refused(reason, detail)
            return
        try:
            self._act(self.hearing.sent(envelope, self.clock))
        except JoinFailed as failed:
            self._be_refused(Reason(failed.reason), failed.detail)

    def hear_published(self, frame: bytes) -> None:
        if self.hearing is not None:
            self._act(self.hearing.published(decoded(frame), self.clock))

    def _join_run(self, run: str, welcome: JoinAccepted) -> None:
        self._welcome, self._run = welcome, run
        self.hearing = hearing = Hearing(self.peer, run, welcome.lease, self.clock)
        self.take(Joined(run))
        self.after(SUBSCRIBE_SECONDS, self._subscribe, hearing)
        self._beat(hearing)
        self._watch(hearing)

    def _subscribe(self, hearing: Hearing) -> None:
        if self.hearing is hearing:
            self._network.subscribe(self, self._welcome.events)

    def _act(self, heard: Heard) -> None:
        if heard.lost:
            self._lose_controller()
            return
        if heard.missed:
            self.has_followed = True
            self.send(SnapshotRequested(self.peer))
        if heard.event is not None:
            self.take(heard.event)

    def _lose_controller(self) -> None:
        if self.world.trace is not None:
            self.world.note(self.name, "lost the controller; joins again")
        self._network.unsubscribe(self)
        self._begin_to_join()

    def _be_refused(self, reason: Reason, detail: str) -> None:
        self.refused = reason
        if self.world.trace is not None:
            self.world.note(self.name, f"is turned out and ends: {detail}")
        self.die()

    def _watch(self, hearing: Hearing) -> None:
        if self.hearing is hearing:
            if hearing.is_lost(self.clock):
                self._lose_controller()
            else:
                wait = max(self._welcome.lease - hearing.silence(self.clock), self._welcome.heartbeat)
                self.after(wait, self._watch, hearing)

    def _beat(self, hearing: Hearing) -> None:
        if self.hearing is hearing:
            self.send(NodeAlive(self.peer, hearing.sequence or 0, tuple(self.served())))
            self.after(self._welcome.heartbeat, self._beat, hearing)

    # -------------------------------------------------------------------------- `bus.group_member`

    def perform_group(self, effect: JoinGroup | LeaveGroup) -> None:
        match effect:
            case JoinGroup(proposal):
                lane = self._view_lanes[proposal.view] = Lane(self)
                lane.add(partial(self._join_view, proposal))
            case LeaveGroup(view):
                lane = self._view_lanes.pop(view)
                lane.interrupt()
                lane.add(partial(self._leave_view, view))

    def _join_view(self, proposal: ViewProposed) -> Steps:
        try:
            yield from within(proposal.timeout, self.collective.join(self, proposal))
        except RendezvousFailed as error:
            missing = tuple(sorted({proposal.members[rank].node for rank in error.missing}))
            self.take(ViewFailed(proposal.view, self.peer, missing, str(error)))
        except TimeoutError:
            self.take(ViewFailed(proposal.view, self.peer, (), "joining failed: TimeoutError"))
        else:
            self.take(ViewJoined(proposal.view, self.peer))

    def _leave_view(self, view: int) -> Steps:
        self.collective.leave(self, view)
        yield from ()


def within(timeout: float, work: Generator[float | Waiting, None, T]) -> Generator[float | Waiting, None, T]:
    """`anyio.fail_after` for the sleeps of a step; what it waits for keeps its own deadline."""
    left = timeout
    try:
        pause = next(work)
        while True:
            if isinstance(pause, Waiting):
                try:
                    value = yield pause
                except Exception as error:
                    pause = work.throw(error)
                else:
                    pause = work.send(value)
            elif pause >= left:
                yield left
                work.close()
                raise TimeoutError
            else:
                yield pause
                left -= pause
                pause = next(work)
    except StopIteration as end:
        result: T = end.value
        return result
