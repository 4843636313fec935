"""A controller that is killed again and again: numbers, commits and the journal outlive every one of its lives.

Same port, same journal. The kills come at a different journal entry each time, so that every step of an update is hit.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from bus.events import UpdateAborted, UpdateCompleted
from bus.journal import SqliteJournal
from tests.faults.fleet import Fleet

NODES = ("node-1", "node-2", "node-3")
STEPS = (
    "UpdateAnnounced",
    "NodeReady node-2",
    "TransferStarted",
    "AdapterReceived node-1",
    "AdapterLoaded node-3",
    "VersionCommitted",
    "VersionActivated node-2",
    "UpdateCompleted",
)
"""The journal entries right after which it is killed, in turn: written, and heard by nobody."""


@pytest.mark.parametrize(
    ("updates", "kills"),
    [
        pytest.param(40, 8, marks=pytest.mark.timeout(180)),
        pytest.param(500, 50, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_no_number_twice_and_no_commit_lost_though_the_controller_is_killed_again_and_again(
    updates: int, kills: int, tmp_path: Path
) -> None:
    """B086, and I7 of the design: a controller that comes back goes on where its journal ends."""
    steps = cycle(STEPS)
    published: list[tuple[int, str]] = []
    with Fleet.open(tmp_path) as fleet:
        fleet.start_trainer()
        for name in NODES:
            fleet.start_node(name)
        fleet.trainer.order("wait_for_nodes", len(NODES))
        fleet.trainer.wait("nodes")
        for update in range(updates):
            if killed := update % (updates // kills) == 0:
                step = next(steps)
                fleet.controller.hold(step)
            fleet.trainer.order("publish", float(update))
            if killed:
                fleet.controller.wait("at", step)
                fleet.controller.kill()
                fleet.restart("controller")
            word, _, result = fleet.outcome(float(update))
            assert word == "committed", f"{result}\n{fleet.story()}"
            published.append((result.version, result.digest))
        fleet.wait_consistent()
        assert set(published) <= set(fleet.committed()), "a commit that the trainer was told of is lost"
        fleet.check_everyone_follows(float(updates))
        fleet.check_history()
        with SqliteJournal(fleet.journal) as journal:
            ended = Counter(type(entry.event) for entry in journal.entries())
    assert len(set(published)) == updates
    assert ended[UpdateCompleted] >= updates
    assert ended[UpdateAborted] <= kills
