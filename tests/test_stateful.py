"""Hypothesis plays the network and the operator against the real minds: it loses, repeats and holds messages, kills
and restarts processes, and when an invariant breaks it shrinks what it did to the shortest story.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from bus.events import Policy
from tools.simulation.faults import STEP_FAULTS, Plan
from tools.simulation.fleet import Fleet
from tools.simulation.network import Network, Weather, Wire
from tools.simulation.world import World

NODES = ["node0", "node1"]
ADAPTER = "math"


class OpenNetwork(Network):
    """A network whose messages lie open on their way: whoever holds it can lose, repeat or hold them."""

    def __init__(self, world: World) -> None:
        super().__init__(world, Weather())
        self.on_their_way: dict[int, tuple[Wire, bytes]] = {}
        self._sent = 0

    def _carry(self, wire: Wire, frame: bytes, extra: float, *, in_order: bool = True) -> None:
        self._sent += 1
        self.on_their_way[self._sent] = (wire, frame)
        self._world.at(self._world.now + 0.01, None, self._go_on, self._sent)

    def _go_on(self, number: int) -> None:
        if (message := self.on_their_way.pop(number, None)) is not None:
            super()._carry(*message, 0.0)

    def take(self, index: int) -> tuple[Wire, bytes]:
        numbers = [*self.on_their_way]
        return self.on_their_way.pop(numbers[index % len(numbers)])

    def put(self, message: tuple[Wire, bytes]) -> None:
        super()._carry(*message, 0.0, in_order=False)


class Bus(RuleBasedStateMachine):
    """A controller, a trainer and two nodes. Invariants are checked as things happen; at the end all must be well."""

    @initialize()
    def start(self) -> None:
        self.world = World(0)
        self.network = OpenNetwork(self.world)
        self.plan = Plan(self.world, events=("rules",))
        self.fleet = Fleet(self.world, self.plan, self.network, NODES, [ADAPTER])
        self.held: list[tuple[Wire, bytes]] = []
        self.fleet.start_controller()
        self.fleet.start_trainer(ADAPTER)
        for name in NODES:
            self.fleet.start_node(name)
        self.world.run_until(3.0)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            for message in self.held:
                self.network.put(message)
            self.fleet.end_faults()
            self.fleet.settle()
            self.fleet.journal.close()

    # ------------------------------------------------------------------------------------------ time

    @rule(seconds=st.sampled_from([0.005, 0.02, 0.05, 0.1, 0.3, 1.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    @rule(seconds=st.sampled_from([3.0, 6.0]))
    def wait_for_a_deadline(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    # --------------------------------------------------------------------------------------- messages

    @precondition(lambda self: self.network.on_their_way)
    @rule(index=st.integers(0, 30))
    def lose(self, index: int) -> None:
        self.network.take(index)

    @precondition(lambda self: self.network.on_their_way)
    @rule(index=st.integers(0, 30))
    def repeat_later(self, index: int) -> None:
        message = self.network.take(index)
        self.held.append(message)
        self.network.put(message)

    @precondition(lambda self: self.network.on_their_way)
    @rule(index=st.integers(0, 30))
    def hold(self, index: int) -> None:
        self.held.append(self.network.take(index))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 30))
    def release(self, index: int) -> None:
        self.network.put(self.held.pop(index % len(self.held)))

    # -------------------------------------------------------------------------------------- processes

    @rule(policy=st.sampled_from(Policy), supersede=st.booleans())
    def publish(self, policy: Policy, supersede: bool) -> None:
        self.fleet.publish(ADAPTER, policy=policy, supersede=supersede)

    @rule(name=st.sampled_from(NODES))
    def kill_a_node(self, name: str) -> None:
        self.fleet.nodes[name].die()

    @rule(name=st.sampled_from(NODES))
    def start_a_node(self, name: str) -> None:
        self.fleet.start_node(name)

    @rule(name=st.sampled_from(NODES))
    def ask_a_node_to_leave(self, name: str) -> None:
        if self.fleet.nodes[name].alive:
            self.fleet.nodes[name].depart()

    @rule()
    def kill_the_trainer(self) -> None:
        self.fleet.trainers[ADAPTER].die()

    @rule()
    def start_the_trainer(self) -> None:
        self.fleet.start_trainer(ADAPTER)

    @rule(effects=st.integers(0, 6))
    def kill_the_controller(self, effects: int) -> None:
        """At once, or between two of the effects it performs next."""
        controller = self.fleet.controller
        assert controller is not None
        if effects:
            controller.crashes_in = effects
        else:
            controller.die()

    @rule()
    def start_the_controller(self) -> None:
        self.fleet.start_controller()

    @rule(step_and_fate=st.sampled_from([(step, fate) for step, fates in STEP_FAULTS.items() for fate in fates]))
    def let_the_next_step_go_wrong(self, step_and_fate: tuple[str, str]) -> None:
        self.plan.doom(*step_and_fate)


TestBus: Any = Bus.TestCase
TestBus.settings = settings(
    max_examples=600,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
