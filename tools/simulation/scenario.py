"""One seed from start to end: a fleet, some publishes, its faults, and then calm weather in which all must be well."""

from __future__ import annotations

from typing import Any, Final

from bus.events import Policy
from tools.simulation.controller import ControllerProcess
from tools.simulation.faults import Plan
from tools.simulation.fleet import LAYOUTS, Fleet
from tools.simulation.network import Network
from tools.simulation.world import Action, Process, World

FAULTS_LAST: Final = 7.0
"""Seconds of a schedule in which faults happen."""


class Scenario:
    """`play` plays one seed to its end, or raises `Violation`."""

    def __init__(self, world: World, nodes: int) -> None:
        rng = world.rng
        plan = Plan.drawn(world)
        adapters = [*LAYOUTS] if rng.random() < 0.35 else [next(iter(LAYOUTS))]
        names = [f"node{number}" for number in range(nodes)]
        self.world = world
        self.fleet = Fleet(world, plan, Network(world, plan.weather), names, adapters)

    def play(self) -> None:
        rng, fleet = self.world.rng, self.fleet
        fleet.start_controller()
        for adapter in fleet.adapters:
            self._at(0.0, 0.5, fleet.start_trainer, adapter)
        for name in fleet.names:
            late = rng.random() < 0.2 and name != fleet.names[0]
            self._at(*((1.0, FAULTS_LAST) if late else (0.0, 0.5)), fleet.start_node, name)
        for adapter in fleet.adapters:
            for _ in range(rng.choice((1, 2, 3) if len(fleet.adapters) == 1 else (0, 1, 1, 2))):
                self._at(1.0, FAULTS_LAST, self._publish, adapter)
        for event in fleet.plan.events:
            self._at(0.5, FAULTS_LAST, self._strike, event)
        self.world.run_until(FAULTS_LAST)
        fleet.end_faults()
        fleet.settle()
        fleet.journal.close()

    def _at(self, earliest: float, latest: float, action: Action, *args: Any) -> None:
        self.world.at(self.world.rng.uniform(earliest, latest), None, action, *args)

    def _publish(self, adapter: str) -> None:
        rng = self.world.rng
        policy = Policy.QUORUM if rng.random() < 0.3 else Policy.STRICT
        quorum = rng.choice((0, 0, 1, 2)) if policy is Policy.QUORUM else 0
        self.fleet.publish(adapter, policy=policy, quorum=quorum, supersede=rng.random() < 0.3)

    # --------------------------------------------------------------------------------------- strikes

    def _strike(self, kind: str) -> None:
        """Let an event of the plan happen, if there is somebody it can happen to."""
        rng, now, fleet = self.world.rng, self.world.now, self.fleet
        pause = rng.uniform(0.2, 6.0)
        back = rng.uniform(0.05, 5.0)
        alive = [node for node in fleet.nodes.values() if node.alive]
        node = rng.choice(alive) if alive else None
        adapter = rng.choice(fleet.adapters)
        trainer = fleet.trainers.get(adapter)
        controller = fleet.controller if fleet.controller is not None and fleet.controller.alive else None
        match kind:
            case "node crash" if node is not None:
                self._kill(kind, node)
                if rng.random() < 0.7:
                    self.world.at(now + back, None, fleet.start_node, node.node)
            case "node restart unnoticed" if node is not None:
                self._kill(kind, node)
                self.world.at(now + 0.05, None, fleet.start_node, node.node)
            case "node leave" if node is not None:
                self.world.fault(kind, node.name)
                node.depart()
                if rng.random() < 0.5:
                    self.world.at(now + back, None, fleet.start_node, node.node)
            case "node paused" if node is not None:
                self._pause(kind, node, pause)
            case "two nodes of one name" if node is not None:
                self.world.fault(kind, node.name)
                fleet.strays.append(node)
                if rng.random() < 0.5:
                    node.paused_until = now + pause
                fleet.nodes[node.node] = fleet.new_node(node.node)
            case "trainer crash" if trainer is not None and trainer.alive:
                self._kill(kind, trainer)
                self.world.at(now + back, None, fleet.start_trainer, adapter)
            case "trainer replaced" if trainer is not None and trainer.alive:
                self._kill(kind, trainer)
                fleet.start_trainer(adapter)
            case "trainer paused" if trainer is not None and trainer.alive:
                self._pause(kind, trainer, pause)
            case "controller crash" if controller is not None:
                self._kill(kind, controller)
                self._bring_controller_back(controller, back)
            case "controller crash between effects" if controller is not None:
                controller.crashes_in = rng.randrange(1, 40)
                self.world.at(now + pause, None, self._bring_controller_back, controller, back)
            case "controller and trainer crash" if controller is not None and trainer is not None and trainer.alive:
                self._kill(kind, controller)
                trainer.die()
                self._bring_controller_back(controller, back)
                self.world.at(now + back, None, fleet.start_trainer, adapter)
            case "controller paused" if controller is not None:
                self._pause(kind, controller, pause)
            case "journal full" if controller is not None:
                controller.journal_full = True
                self.world.at(now + pause, None, self._bring_controller_back, controller, back)
            case "partition that swallows" | "partition that holds":
                names = [*fleet.names, *(f"trainer-{one}" for one in fleet.adapters)]
                apart = frozenset(rng.sample(names, rng.randint(1, len(names))))
                self.world.fault(kind, ", ".join(sorted(apart)))
                partition = fleet.network.part(apart, swallows=kind == "partition that swallows")
                self.world.at(now + pause, None, fleet.network.heal, partition)

    def _kill(self, kind: str, process: Process) -> None:
        self.world.fault(kind, process.name)
        process.die()

    def _pause(self, kind: str, process: Process, seconds: float) -> None:
        self.world.fault(kind, process.name, f"{seconds:.2f} s")
        process.paused_until = self.world.now + seconds

    def _bring_controller_back(self, controller: ControllerProcess, back: float) -> None:
        if not controller.alive:
            address = controller.address if self.world.rng.random() < 0.3 else None
            self.world.at(self.world.now + back, None, self.fleet.start_controller, address)
        else:
            controller.crashes_in = None
            controller.journal_full = False
