"""One row per fault and phase: what `publish` says, how long until the fleet is one again, and that it goes on.

Three nodes, a trainer and a controller, each a process of its own. A gate stops the process at the very step; there
the victim is killed (SIGKILL), stopped for longer than its lease (SIGSTOP, then SIGCONT), cut off (its link swallows
bytes and closes nothing), or its engine fails or never returns. Seconds count from the strike until every live node
serves the head and the publish has ended, then from the healing until the victim does, too; for the controller, which
everybody waits for, from its return. After every row the next publish reaches all three nodes, and the journal and
what each node ever served are checked.

B014, B015, B017, B086, B088 of the cases are rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from bus.events import Outcome, Phase, Reason
from bus.view import VIEW_GRACE
from tests.faults.fleet import Fleet, Stopwatch
from tests.faults.gates import FAIL, GO
from tests.faults.processes import SHORT, Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]  # minutes together, and bounds that want a quiet machine


class Fault(StrEnum):
    KILLED = "killed"
    STOPPED = "stopped"
    CUT_OFF = "cut off"
    FAILS = "engine fails"
    HANGS = "engine never returns"


class At(StrEnum):
    """Where in the life of a view or an update the victim is struck."""

    JOINING = "joining a view"
    READY = "ready"
    AFTER_READY = "after ready"
    TRANSFER = "transfer"
    LOAD = "load"
    AFTER_LOAD = "after load"
    COMMIT = "commit, not heard yet"
    ACTIVATE = "activate"
    IDLE = "idle, publish at once"
    CATCHING_UP = "catching up"


SLACK: Final = 2.0
"""Seconds for everything that is work, not waiting, on a machine that is busy with other things."""

DEATH: Final = SHORT.lease + SLACK
"""A silent peer is given up, and what it held up is done without it."""

EMPTY_SEAT: Final = SHORT.view + VIEW_GRACE + SHORT.lease + SLACK
"""A group waits for someone who will not come."""

REJOIN: Final = SHORT.lease + SLACK
"""A peer notices, joins again, and catches up."""


@dataclass(frozen=True)
class Row:
    """What is struck, how and where; what `publish` must say; and the bounds, in seconds.

    `expected` is "committed" with the outcome of the victim (None: not named), or the phase of the failure.
    """

    victim: str
    fault: Fault
    at: At
    expected: tuple[str, Any]
    bound: float
    healed: float = REJOIN

    def __str__(self) -> str:
        return f"{self.victim} {self.fault}, {self.at}"

    def is_cut(self, name: str) -> bool:
        """Whether a peer's link is one that this row cuts; cutting the controller off means everyone's."""
        return self.fault is Fault.CUT_OFF and self.victim in (name, CONTROLLER)


def committed(outcome: Outcome | None) -> tuple[str, Any]:
    return "committed", outcome


def failed(phase: Phase) -> tuple[str, Any]:
    return "failed", phase


NODE, TRAINER, CONTROLLER = "node-3", "trainer", "controller"
LOST, LATE, DONE = Outcome.LOST, Outcome.LATE, Outcome.ACTIVATED

LATECOMER: Final = {At.JOINING, At.CATCHING_UP}
"""Phases that a fleet of two passes because a third node comes."""

GATES: Final = {
    NODE: {
        At.JOINING: "join_view",
        At.READY: "prepare",
        At.TRANSFER: "receive",
        At.LOAD: "load",
        At.ACTIVATE: "activate",
        At.CATCHING_UP: "receive",
    },
    TRAINER: {At.JOINING: "join_view", At.TRANSFER: "transmit", At.CATCHING_UP: "transmit"},
    CONTROLLER: {
        At.JOINING: "ViewProposed",
        At.READY: "UpdateAnnounced",
        At.AFTER_READY: f"NodeReady {NODE}",
        At.TRANSFER: "TransferStarted",
        At.LOAD: f"AdapterReceived {NODE}",
        At.AFTER_LOAD: f"AdapterLoaded {NODE}",
        At.COMMIT: "VersionCommitted",
        At.ACTIVATE: f"VersionActivated {NODE}",
        At.CATCHING_UP: "UpdateAnnounced",
    },
}
"""The victim's own gate where it has one; else the controller stands still behind that journal entry meanwhile."""


def rows() -> Iterator[Row]:
    cuts = (Fault.KILLED, Fault.STOPPED, Fault.CUT_OFF)
    for fault, at in product(cuts, At):
        bound = EMPTY_SEAT if at in (At.AFTER_READY, At.TRANSFER, At.IDLE, At.CATCHING_UP) else DEATH
        yield Row(NODE, fault, at, committed(LOST), bound)
    for fault, wait in ((Fault.FAILS, 0.0), (Fault.HANGS, 1.0)):
        yield Row(NODE, fault, At.JOINING, committed(LATE), EMPTY_SEAT, EMPTY_SEAT + SHORT.view)
        yield Row(NODE, fault, At.READY, failed(Phase.READY), wait * SHORT.ready + SLACK)
        yield Row(NODE, fault, At.TRANSFER, committed(DONE), wait * SHORT.transfer + SLACK)
        yield Row(NODE, fault, At.LOAD, failed(Phase.LOAD), wait * SHORT.load + SLACK)
        yield Row(NODE, fault, At.ACTIVATE, committed(LATE), SHORT.activate + SLACK)
        yield Row(NODE, fault, At.CATCHING_UP, committed(DONE), wait * SHORT.transfer + SLACK)
    for fault, at in product(cuts, (At.JOINING, At.READY, At.TRANSFER, At.LOAD, At.COMMIT, At.IDLE, At.CATCHING_UP)):
        yield Row(TRAINER, fault, at, committed(DONE), DEATH, REJOIN + SLACK)
    for fault, at in product(cuts, At):
        yield Row(CONTROLLER, fault, at, committed(DONE), REJOIN + SLACK)


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[Row, float, float]]]:
    measured: list[tuple[Row, float, float]] = []
    yield measured
    print(f"\n{'fault and phase':<50} {'seconds':>8} {'bound':>6} {'healed':>8} {'bound':>6}")
    for row, seconds, healed in measured:
        print(f"{row!s:<50} {seconds:8.2f} {row.bound:6.1f} {healed:8.2f} {row.healed:6.1f}")


@pytest.mark.parametrize("row", list(rows()), ids=str)
def test_whatever_is_struck_at_any_step_the_fleet_is_one_again_in_time(
    row: Row, tmp_path: Path, table: list[tuple[Row, float, float]]
) -> None:
    with Fleet.open(tmp_path) as fleet:
        _start(fleet, row)
        gate = _park(fleet, row)
        heal = _strike(fleet, row, gate)
        if row.victim is NODE:
            seconds, healed = _watch_node(fleet, row, heal)
        elif row.victim is TRAINER:
            seconds, healed = _watch_trainer(fleet, row, heal)
        else:
            seconds, healed = _watch_controller(fleet, row, heal)
        table.append((row, seconds, healed))
        fleet.check_everyone_follows(3.0)
        fleet.check_history()
    assert seconds <= row.bound
    assert healed <= row.healed


def _start(fleet: Fleet, row: Row) -> None:
    """A fleet that serves version 1, without the third node if the phase is about its coming."""
    fleet.start_trainer(proxied=row.is_cut(TRAINER))
    for name in ("node-1", "node-2") if row.at in LATECOMER else ("node-1", "node-2", NODE):
        fleet.start_node(name, proxied=row.is_cut(name))
    fleet.trainer.order("wait_for_nodes", len(fleet.nodes))
    fleet.trainer.wait("nodes")
    assert fleet.publish(1.0)[0] == "committed", fleet.story()
    fleet.wait_consistent()


def _park(fleet: Fleet, row: Row) -> tuple[Process, str] | None:
    """Bring the fleet to the phase and hold it there; returns who stands at which gate."""
    if row.at is At.IDLE:
        return None
    own = GATES[row.victim].get(row.at)
    gate = own or GATES[CONTROLLER][row.at]
    if row.at in LATECOMER and own and row.victim is NODE:
        holder = fleet.start_node(NODE, hold=gate, proxied=row.is_cut(NODE))
    else:
        holder = fleet.process(row.victim if own else CONTROLLER)
        holder.hold(gate)
        if row.at in LATECOMER:
            fleet.start_node(NODE, proxied=row.is_cut(NODE))
    if row.at not in LATECOMER:
        fleet.trainer.order("publish", 2.0)
    holder.wait("at", gate)
    return holder, gate


def _strike(fleet: Fleet, row: Row, gate: tuple[Process, str] | None) -> Callable[[], None]:
    """Strike; returns what heals it, once those concerned have noticed."""
    victim = fleet.process(row.victim)
    match row.fault:
        case Fault.KILLED:
            victim.kill()
        case Fault.STOPPED:
            victim.stop()
        case Fault.CUT_OFF:
            fleet.proxy.cut()
    if row.at in LATECOMER | {At.IDLE} and not (row.victim is TRAINER and row.fault is Fault.KILLED):
        fleet.trainer.order("publish", 2.0)
    if gate is not None and row.fault is not Fault.HANGS and (gate[0] is not victim or row.fault is not Fault.KILLED):
        gate[0].release(gate[1], FAIL if row.fault is Fault.FAILS else GO)

    def heal() -> None:
        match row.fault, row.victim:
            case Fault.KILLED, _:
                fleet.restart(row.victim)
            case Fault.STOPPED | Fault.CUT_OFF, "controller":
                fleet.trainer.wait("log", lambda text: "lost the controller" in text)
            case Fault.STOPPED | Fault.CUT_OFF, _:
                fleet.controller.wait("journaled", "NodeLost", row.victim)
        match row.fault:
            case Fault.STOPPED:
                victim.resume()
            case Fault.CUT_OFF:
                fleet.proxy.heal()

    return heal


def _watch_node(fleet: Fleet, row: Row, heal: Callable[[], None]) -> tuple[float, float]:
    """The others get the version, or all are told why not; healed, the node catches up."""
    watch = Stopwatch()
    word, _, facts = fleet.outcome(2.0)
    fleet.wait_consistent("node-1", "node-2")
    seconds = watch.seconds
    expected, detail = row.expected
    assert word == expected, f"{facts}\n{fleet.story()}"
    if word == "committed":
        named = {node.node: node.outcome for node in facts.nodes}
        assert named.get(NODE) == detail, f"{facts}\n{fleet.story()}"
        assert named["node-1"] == named["node-2"] == DONE, f"{facts}\n{fleet.story()}"
    else:
        assert (facts["node"], facts["phase"]) == (NODE, detail), facts
        assert facts["reason"] in (Reason.DEADLINE_PASSED, Reason.ENGINE_FAILED, Reason.NO_FREE_SLOT), facts
    heal()
    watch = Stopwatch()
    fleet.wait_consistent()
    return seconds, watch.seconds


def _watch_trainer(fleet: Fleet, row: Row, heal: Callable[[], None]) -> tuple[float, float]:
    """What it had under way is over when its lease is; healed, it goes on, and what it still wants is published."""
    watch = Stopwatch()
    fleet.controller.wait("journaled", "NodeLost", TRAINER)
    fleet.wait_consistent("node-1", "node-2")
    seconds = watch.seconds
    heal()
    watch = Stopwatch()
    if row.fault is Fault.KILLED:
        fleet.check_everyone_follows(2.5)
    else:
        word, _, facts = fleet.outcome(2.0)
        assert word == "committed", f"{facts}\n{fleet.story()}"
        fleet.wait_consistent()
    return seconds, watch.seconds


def _watch_controller(fleet: Fleet, row: Row, heal: Callable[[], None]) -> tuple[float, float]:
    """Nobody is served anything else meanwhile; from its return on everybody finds it, and the publish goes through."""
    heal()
    watch = Stopwatch()
    word, _, facts = fleet.outcome(2.0)
    fleet.wait_consistent()
    assert word == "committed", f"{facts}\n{fleet.story()}"
    return watch.seconds, 0.0
