"""The wires of the control plane: requests to the controller, answers, and what it publishes; any may be lost.

In calm weather a wire keeps its order, as ZeroMQ does. A frame on its way to a controller that has restarted
since is sent again by a socket whose process still lives, and gone with one that does not. A frame for a process
that has died is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from bus.codec import EVENT_CODEC
from bus.events import Envelope, Peer
from tools.simulation.story import shown
from tools.simulation.world import World

if TYPE_CHECKING:
    from tools.simulation.controller import ControllerProcess
    from tools.simulation.peer import PeerProcess

LATENCY = 0.01
RECONNECT_SECONDS = 0.1


# Coding is pure, and small worlds say the same things again and again: every frame that differs is really coded.


@lru_cache(maxsize=20_000)
def encoded(envelope: Envelope) -> bytes:
    return EVENT_CODEC.encode(envelope)


@lru_cache(maxsize=20_000)
def decoded(frame: bytes) -> Envelope:
    return EVENT_CODEC.decode(frame)


@dataclass(slots=True)
class Weather:
    """How likely each fate of a frame is; all zero is calm."""

    lost: float = 0.0
    duplicated: float = 0.0
    delayed: float = 0.0
    reordered: float = 0.0

    @property
    def is_calm(self) -> bool:
        return not (self.lost or self.duplicated or self.delayed or self.reordered)


@dataclass(slots=True)
class Partition:
    """Peers, by name, that cannot reach the controller; it holds frames until it ends, or swallows them."""

    nodes: frozenset[str]
    swallows: bool
    held: list[tuple[Wire, bytes]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Wire:
    """One direction between a peer and the controller, or from its publisher to a subscriber."""

    peer: PeerProcess
    kind: str
    free_at: float = 0.0


class Network:
    """Carries frames between one controller, whichever runs, and every peer."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.weather = weather
        self.controller: ControllerProcess | None = None
        self._world = world
        self._random = world.rng.random
        self._calm = weather.is_calm
        self._peers: dict[Peer, PeerProcess] = {}
        self._subscribed: dict[PeerProcess, str] = {}
        self._wires: dict[tuple[PeerProcess, str], Wire] = {}
        self._partitions: list[Partition] = []
        self._undelivered: list[tuple[Wire, bytes]] = []

    def listen(self, controller: ControllerProcess) -> None:
        """A controller is there: sockets that still live send it what they hold."""
        self.controller = controller
        held, self._undelivered = self._undelivered, []
        for wire, frame in held:
            if wire.peer.alive:
                self._carry(wire, frame, RECONNECT_SECONDS)

    def close(self, controller: ControllerProcess) -> None:
        if self.controller is controller:
            self.controller = None

    def connect(self, process: PeerProcess) -> None:
        self._peers[process.peer] = process

    def disconnect(self, process: PeerProcess) -> None:
        self._peers.pop(process.peer, None)
        self._subscribed.pop(process, None)

    def subscribe(self, process: PeerProcess, address: str) -> None:
        self._subscribed[process] = address

    def unsubscribe(self, process: PeerProcess) -> None:
        self._subscribed.pop(process, None)

    # ---------------------------------------------------------------------------------------- sends

    def request(self, sender: PeerProcess, frame: bytes) -> None:
        """From a peer's DEALER to the controller's ROUTER."""
        self._send(self._wire(sender, "request"), frame)

    def answer(self, peer: Peer, frame: bytes) -> None:
        """From the ROUTER to one peer, if it is connected."""
        process = self._peers.get(peer)
        if process is not None:
            self._send(self._wire(process, "answer"), frame)

    def publish(self, address: str, frame: bytes) -> None:
        """From the XPUB at an address to everyone who subscribed there."""
        for process, subscribed in self._subscribed.items():
            if subscribed == address:
                self._send(self._wire(process, "published"), frame)

    # ----------------------------------------------------------------------------------- partitions

    def part(self, nodes: frozenset[str], *, swallows: bool) -> Partition:
        partition = Partition(nodes, swallows)
        self._partitions.append(partition)
        return partition

    def heal(self, partition: Partition) -> None:
        """End a partition; what it held goes on its way."""
        if partition in self._partitions:
            self._partitions.remove(partition)
            for wire, frame in partition.held:
                self._carry(wire, frame, 0.0)

    def calm_down(self) -> None:
        """From now on every frame arrives, once and in order."""
        self.weather = Weather()
        self._calm = True
        for partition in [*self._partitions]:
            self.heal(partition)

    # -------------------------------------------------------------------------------------- carrying

    def _wire(self, peer: PeerProcess, kind: str) -> Wire:
        wire = self._wires.get((peer, kind))
        if wire is None:
            wire = self._wires[peer, kind] = Wire(peer, kind)
        return wire

    def _send(self, wire: Wire, frame: bytes) -> None:
        for partition in self._partitions:
            if wire.peer.node in partition.nodes:
                if partition.swallows:
                    self._world.fault("swallowed by a partition", wire.peer.name, wire.kind)
                else:
                    self._world.fault("held by a partition", wire.peer.name, wire.kind)
                    partition.held.append((wire, frame))
                return
        if self._calm:
            self._carry(wire, frame, 0.0)
            return
        weather, fate = self.weather, self._random()
        if (fate := fate - weather.lost) < 0:
            self._world.fault("message lost", wire.peer.name, self._shown(wire, frame))
        elif (fate := fate - weather.duplicated) < 0:
            self._world.fault("message duplicated", wire.peer.name, self._shown(wire, frame))
            self._carry(wire, frame, 0.0)
            self._carry(wire, frame, self._world.rng.uniform(0.05, 1.0), in_order=False)
        elif (fate := fate - weather.delayed) < 0:
            self._world.fault("message delayed", wire.peer.name, self._shown(wire, frame))
            self._carry(wire, frame, self._world.rng.uniform(0.1, 2.0))
        elif fate - weather.reordered < 0:
            self._world.fault("message reordered", wire.peer.name, self._shown(wire, frame))
            self._carry(wire, frame, self._world.rng.uniform(0.05, 1.0), in_order=False)
        else:
            self._carry(wire, frame, 0.0)

    def _carry(self, wire: Wire, frame: bytes, extra: float, *, in_order: bool = True) -> None:
        arrives = self._world.now + LATENCY * self._random() + extra
        if in_order:
            arrives = wire.free_at = max(arrives, wire.free_at)
        if wire.kind == "request":
            self._world.at(arrives, None, self._arrive, self.controller, wire, frame)
        elif wire.kind == "answer":
            self._world.at(arrives, wire.peer, wire.peer.hear_answer, frame)
        else:
            self._world.at(arrives, wire.peer, wire.peer.hear_published, frame)

    def _arrive(self, towards: ControllerProcess | None, wire: Wire, frame: bytes) -> None:
        """A request has come to where the controller was when it was sent."""
        controller = self.controller
        if towards is not None and controller is not towards:
            return  # it was on its way when that controller died
        if controller is None:
            self._undelivered.append((wire, frame))
        elif controller.paused_until > self._world.now:
            self._world.at(controller.paused_until, controller, controller.receive, wire.peer, frame)
        else:
            controller.receive(wire.peer, frame)

    def _shown(self, wire: Wire, frame: bytes) -> str:
        return f"{wire.kind} {shown(decoded(frame).event)}" if self._world.trace is not None else ""
