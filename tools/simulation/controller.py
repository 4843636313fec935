"""The controller, simulated: the real coordinator and journal, with `bus.controller`'s shell around them."""

from __future__ import annotations

from bus.coordinator import Coordinator
from bus.errors import JournalError
from bus.events import ControllerStarted, Envelope, Event, NodeAlive
from bus.journal import Journal
from bus.protocol import Effect, Publish, Record, Send, Timeouts
from tools.simulation.invariants import Invariants
from tools.simulation.network import Network, decoded, encoded
from tools.simulation.peer import PeerProcess
from tools.simulation.story import shown
from tools.simulation.world import Crashed, Process, World


class ControllerProcess(Process):
    """One run of the controller over a journal that outlives it."""

    def __init__(
        self,
        world: World,
        network: Network,
        journal: Journal,
        invariants: Invariants,
        *,
        run: str,
        address: str,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(world, f"controller {run}")
        self.run = run
        self.address = address
        self.coordinator = Coordinator(run, address, timeouts)
        self.crashes_in: int | None = None
        """After how many more moments of performing effects this process dies; None: it lives."""
        self.journal_full = False
        self._network = network
        self._journal = journal
        self._invariants = invariants
        self._published = 0
        self._wakes_at = float("inf")

    def start(self) -> None:
        """Take up the journal, and listen."""
        self._network.listen(self)
        restored = self.coordinator.restore(entry.event for entry in self._journal.entries())
        self.perform([Publish(ControllerStarted(self.address)), *restored])
        self._invariants.coordinated(self.coordinator)
        self._beat()

    def die(self) -> None:
        super().die()
        self._network.close(self)

    def receive(self, sender: PeerProcess, frame: bytes) -> None:
        event = decoded(frame).event
        if getattr(event, "peer", sender.peer) == sender.peer:
            effects = self.coordinator.handle(event, sender.peer, self.clock)
            if effects or not isinstance(event, NodeAlive):
                self.perform(effects)
                self._invariants.coordinated(self.coordinator)
                self._set_alarm()  # a heartbeat alone only puts deadlines off

    def _set_alarm(self) -> None:
        deadline = self.coordinator.next_deadline()
        if deadline is not None and deadline < self._wakes_at:
            self._wakes_at = deadline
            self.sleep_until(deadline, self._wake, deadline)

    def _wake(self, alarm: float) -> None:
        if alarm != self._wakes_at:
            return
        self._wakes_at = float("inf")
        deadline, now = self.coordinator.next_deadline(), self.clock
        if deadline is not None and deadline <= now:
            if now - deadline > self.coordinator.timeouts.heartbeat:
                self.coordinator.forgive_silence(now)
            self.perform(self.coordinator.handle_time(now))
            self._invariants.coordinated(self.coordinator)
        self._set_alarm()

    def _beat(self) -> None:
        alive = self.coordinator.heartbeat(self._published)
        self._network.publish(self.address, encoded(Envelope(self.run, 0, alive)))
        self.after(self.coordinator.timeouts.heartbeat, self._beat)

    # --------------------------------------------------------------------------------------- effects

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(event):
                    self._publish(event)
                case Record(event):
                    self._append(event)
                case Send(peer, event):
                    self._note(peer.node, event)
                    self._network.answer(peer, encoded(Envelope(self.run, 0, event)))
            self._moment()

    def _publish(self, event: Event) -> None:
        frame = self._append(event)
        self._published = self._journal.sequence
        self._moment()
        self._announce(event, frame)

    def _announce(self, event: Event, frame: bytes) -> None:
        self._note("all", event)
        self._invariants.published(decoded(frame).sequence, event)
        self._network.publish(self.address, frame)

    def _append(self, event: Event) -> bytes:
        if self.journal_full:
            self.world.fault("journal full", self.name, type(event).__name__)
            raise Crashed(self) from JournalError("journal", "no space left")
        frame = self._journal.append(self.run, event, self.world.now, self._published)
        self._invariants.journaled(self._journal.sequence, event, self.coordinator)
        return frame

    def _moment(self) -> None:
        """A point between two effects; an armed crash happens at one."""
        if self.crashes_in is not None:
            self.crashes_in -= 1
            if self.crashes_in <= 0:
                self.world.fault("controller crash between effects", self.name)
                raise Crashed(self)

    def _note(self, whom: str, event: Event) -> None:
        if self.world.trace is not None:
            self.world.note(self.name, f"to {whom}: {shown(event)}")
