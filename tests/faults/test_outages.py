"""What a trainer is told while nobody, or somebody else, is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.events import Phase, Reason
from tests.faults.fleet import Fleet, Stopwatch
from tests.faults.processes import SHORT

pytestmark = pytest.mark.slow

SLACK = 2.0


def test_a_trainer_that_is_started_again_at_once_waits_for_its_former_lease_and_goes_on(tmp_path: Path) -> None:
    with Fleet.open(tmp_path) as fleet:
        fleet.start_trainer()
        fleet.start_node("node-1")
        assert fleet.publish(1.0)[0] == "committed"
        fleet.trainer.kill()
        watch = Stopwatch()
        fleet.start_trainer()
        assert fleet.trainer.said[-1] == ("open",), fleet.story()
        assert watch.seconds < SHORT.lease + SLACK
        fleet.check_everyone_follows(2.0)
        fleet.check_history()


def test_a_second_trainer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Fleet.open(tmp_path) as fleet:
        first = fleet.start_trainer()
        fleet.start_node("node-1")
        watch = Stopwatch()
        word, why = fleet.start_trainer().said[-1]
        assert (word, Reason.ADAPTER_TAKEN in why) == ("crashed", True)
        assert watch.seconds < SHORT.lease + SLACK
        fleet.trainer = first
        fleet.check_everyone_follows(1.0)


def test_a_publish_while_the_controller_is_away_ends_at_its_deadline_and_says_so(tmp_path: Path) -> None:
    with Fleet.open(tmp_path) as fleet:
        fleet.start_trainer()
        fleet.start_node("node-1")
        assert fleet.publish(1.0)[0] == "committed"
        fleet.controller.kill()
        watch = Stopwatch()
        fleet.trainer.order("publish", 2.0, 1.0)
        word, _, facts = fleet.outcome(2.0)
        assert watch.seconds < 1.0 + SHORT.lease + SLACK
        assert (word, facts["phase"], facts["reason"]) == ("failed", Phase.QUEUE, Reason.DEADLINE_PASSED)
        assert "did not answer" in facts["detail"]
        fleet.restart("controller")
        fleet.check_everyone_follows(3.0)
        fleet.check_history()
