"""A fleet in a world: a controller on a journal, a trainer for each adapter, nodes; and what "all is well" means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from bus.events import (
    Event,
    JoinRequested,
    NodeCapabilities,
    Peer,
    Policy,
    PublishRefused,
    Reason,
    Role,
    UpdateCompleted,
)
from bus.journal import SqliteJournal
from bus.manifest import AdapterLayout, BaseModel, TensorSpec
from bus.protocol import Timeouts
from tools.simulation.collective import Collective
from tools.simulation.controller import ControllerProcess
from tools.simulation.faults import Plan
from tools.simulation.invariants import Invariants, Violation
from tools.simulation.network import Network
from tools.simulation.node import NodeProcess
from tools.simulation.trainer import TrainerProcess
from tools.simulation.world import World

TIMEOUTS: Final = Timeouts(
    heartbeat=2.0,
    lease=5.0,
    view=3.0,
    ready=3.0,
    transfer=2.0,
    load=3.0,
    activate=1.5,
    publish=8.0,
    losses=4,
    loss_window=20.0,
    quarantine=3.0,
    quarantine_limit=6.0,
)
SETTLING_BOUND: Final = 60.0
"""Seconds after the last fault by which every live node must serve every head."""

PUBLISH_TRIES: Final = 3
"""How many publishes of each trainer, after that, it may take until one goes through."""

LOOK_EVERY: Final = 0.5
"""Seconds between two looks at whether all is well."""

_BASE = BaseModel("tiny", "config:0123456789abcdef")
_MODULE = "base_model.model.model.layers.0.self_attn"


def _layout(module: str) -> AdapterLayout:
    down, up = f"{_MODULE}.{module}.lora_A.weight", f"{_MODULE}.{module}.lora_B.weight"
    return AdapterLayout(_BASE, "{}", (TensorSpec(down, "float32", (4, 8)), TensorSpec(up, "float32", (8, 4))))


LAYOUTS: Final = {"math": _layout("q_proj"), "code": _layout("v_proj")}
"""The adapters, each with a trainer of its own."""

CAPABILITIES: Final = {
    slots: NodeCapabilities(_BASE, 16, slots, ("q_proj", "v_proj"), "float32", workers, "cpu", "modelled", "1")
    for slots, workers in ((3, 1), (4, 2), (6, 1))
}
"""What a node can serve, by its slots: each adapter needs one more than it serves while it changes versions."""


@dataclass(slots=True)
class Publishing:
    """A publish of the last phase, in which nothing stands in its way."""

    trainer: TrainerProcess
    tries: int = 0
    done: bool = False


class Fleet:
    """Every process of a world; they are started by name, and may be killed at any time."""

    def __init__(self, world: World, plan: Plan, network: Network, names: list[str], adapters: list[str]) -> None:
        self.world = world
        self.plan = plan
        self.network = network
        self.names = names
        self.adapters = adapters
        self.invariants = Invariants()
        self.collective = Collective(plan, self.invariants)
        self.journal = SqliteJournal(":memory:")
        self.controller: ControllerProcess | None = None
        self.trainers: dict[str, TrainerProcess] = {}
        self.nodes: dict[str, NodeProcess] = {}
        self.strays: list[NodeProcess] = []
        """Processes whose name another one has taken."""
        self._started = 0
        self._requests = 0

    # --------------------------------------------------------------------------------------- starts

    def _incarnation(self) -> str:
        self._started += 1
        return f"i{self._started}"

    def start_controller(self, address: str | None = None) -> None:
        if self.controller is not None and self.controller.alive:
            return
        run = f"run{self._started}"
        self._started += 1
        self.controller = ControllerProcess(
            self.world,
            self.network,
            self.journal,
            self.invariants,
            run=run,
            address=address or f"tcp://controller/{run}",
            timeouts=TIMEOUTS,
        )
        self.world.note(self.controller.name, "starts")
        self.controller.start()

    def start_trainer(self, adapter: str) -> None:
        former = self.trainers.get(adapter)
        if former is not None and former.alive:
            return
        incarnation = self._incarnation()
        peer = Peer(f"trainer-{adapter}", incarnation)
        join = JoinRequested(peer, Role.TRAINER, (adapter,), store=f"store:{incarnation}")
        trainer = TrainerProcess(
            self.world, self.network, self.collective, self.invariants, join, LAYOUTS[adapter], TIMEOUTS
        )
        self.trainers[adapter] = trainer
        self.world.note(trainer.name, "starts")
        trainer.start()
        self.world.at(self.world.now + 1.0, None, self._start_again_if_refused, adapter)

    def _start_again_if_refused(self, adapter: str) -> None:
        """Whoever runs a trainer starts it again as long as its own past holds the adapter."""
        trainer = self.trainers[adapter]
        if trainer.refused is Reason.ADAPTER_TAKEN:
            self.start_trainer(adapter)
        elif trainer.alive and trainer.hearing is None:
            self.world.at(self.world.now + 1.0, None, self._start_again_if_refused, adapter)

    def start_node(self, name: str) -> None:
        former = self.nodes.get(name)
        if former is not None and former.alive:
            return
        self.nodes[name] = self.new_node(name)

    def new_node(self, name: str) -> NodeProcess:
        rng = self.world.rng
        only = (rng.choice(self.adapters),) if rng.random() < 0.15 and name != self.names[0] else ()
        join = JoinRequested(
            Peer(name, self._incarnation()), Role.ROLLOUT, only, CAPABILITIES[rng.choice((2 + len(self.adapters), 6))]
        )
        node = NodeProcess(self.world, self.network, self.collective, self.invariants, self.plan, join, TIMEOUTS)
        self.world.note(node.name, f"starts{f', for {only[0]} only' if only else ''}")
        node.start()
        return node

    def publish(
        self,
        adapter: str,
        ended: Callable[[Event | None], None] = lambda _: None,
        *,
        policy: Policy = Policy.STRICT,
        quorum: int = 0,
        supersede: bool = False,
    ) -> None:
        """Have an adapter's trainer publish something new; nothing happens if it does not live."""
        trainer = self.trainers.get(adapter)
        if trainer is None or not trainer.alive:
            return
        if not trainer.has_followed:  # a publisher opens only once it hears what is published
            again = partial(self.publish, adapter, ended, policy=policy, quorum=quorum, supersede=supersede)
            self.world.at(self.world.now + 0.5, None, again)
            return
        self._requests += 1
        request = f"r{self._requests}"
        name = trainer.name

        def told(end: Event | None) -> None:
            if end is None and self.plan.spares_the_wires:
                raise Violation("I6", f"nobody told {name} how its publish {request} ended")
            superseded = isinstance(end, PublishRefused) and end.reason is Reason.SUPERSEDED
            if self.plan.is_empty and not superseded and not isinstance(end, UpdateCompleted):
                raise Violation("I6", f"nothing went wrong, yet publish {request} of {name} ended with {end}")
            ended(end)

        self.world.note(trainer.name, f"publishes {request}, {policy}{' supersede' if supersede else ''}")
        trainer.publish(
            request,
            f"blake3:{adapter}-{request}",
            TIMEOUTS.publish,
            told,
            policy=policy,
            quorum=quorum,
            supersede=supersede,
        )

    # -------------------------------------------------------------------------------------- all well

    def end_faults(self) -> None:
        """From here on nothing goes wrong any more, and everything that should run does."""
        self.world.note("world", "faults end here")
        self.plan.end()
        self.network.calm_down()
        now = self.world.now
        for process in [self.controller, *self.trainers.values(), *self.nodes.values(), *self.strays]:
            if process is not None and process.alive:
                process.paused_until = min(process.paused_until, now)
        if self.controller is not None:
            self.controller.crashes_in = None
            self.controller.journal_full = False
        self.start_controller()
        for adapter in self.adapters:
            self.start_trainer(adapter)
        self.start_node(self.names[0])  # which follows every adapter, so that there is somebody to publish to

    def _play_until(self, end: float, is_done: Callable[[], bool]) -> bool:
        """Let things happen until `end`, or until it is done; looks every half a second."""
        while self.world.now < end:
            self.world.run_until(min(self.world.now + LOOK_EVERY, end))
            if is_done():
                return True
        return False

    def settle(self) -> None:
        """I6: every live node reaches every head, and then a publish of every trainer goes through."""
        if not self._play_until(self.world.now + SETTLING_BOUND, self._is_settled):
            raise Violation("I6", f"{SETTLING_BOUND:g} s after the last fault {self._unsettled()}")
        publishing = {adapter: Publishing(self.trainers[adapter]) for adapter in self.adapters}
        for adapter in publishing:
            self._try_to_publish(adapter, publishing)
        bound = PUBLISH_TRIES * (TIMEOUTS.publish + TIMEOUTS.lease) + SETTLING_BOUND

        def is_done() -> bool:
            return all(one.done for one in publishing.values()) and self._is_settled()

        if not self._play_until(self.world.now + bound, is_done):
            waiting = [adapter for adapter, one in publishing.items() if not one.done]
            why = f"no publish of {', '.join(waiting)} went through" if waiting else self._unsettled()
            raise Violation("I6", f"{bound:g} s after the last publishes began {why}")

    def _try_to_publish(self, adapter: str, publishing: dict[str, Publishing]) -> None:
        one = publishing[adapter]
        one.tries += 1

        def ended(end: Event | None) -> None:
            if isinstance(end, UpdateCompleted):
                one.done = True
            elif one.tries < PUBLISH_TRIES:
                self._try_to_publish(adapter, publishing)

        self.publish(adapter, ended)

    def _is_settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        """What is not as it must be once all is well; empty if everything is."""
        for trainer in self.trainers.values():
            if not trainer.alive or trainer.hearing is None or trainer.hearing.sequence is None:
                return f"{trainer.name} is not on the bus"
            if trainer.pending:
                return f"{trainer.name} still waits for {', '.join(trainer.pending)}"
        for name in self.names:
            processes = [one for one in [*self.strays, self.nodes.get(name)] if one is not None and one.node == name]
            live = [process for process in processes if process.alive]
            if processes and not live and all(one.refused for one in processes):
                return f"every process that called itself {name} was turned out"
            for node in live[-1:] if len(live) == 1 else live:
                if (problem := self._lag(node)) is not None:
                    return problem
        return ""

    def _lag(self, node: NodeProcess) -> str | None:
        if node.hearing is None or node.hearing.sequence is None:
            return f"{node.name} is not on the bus"
        for adapter, head in self.invariants.heads.items():
            trainer = self.trainers[adapter]
            if node.participant.adapters and adapter not in node.participant.adapters:
                continue
            if trainer.head != head:
                continue  # nobody holds the bytes any more: the next publish brings every node on
            resident = node.engine.alias.get(adapter)
            if resident is None or resident.attempt.version != head.version:
                return f"{node.name} serves {resident and resident.attempt}, not {adapter}@{head.version}"
        return None
