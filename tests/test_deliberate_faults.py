"""The rig sees: the simulation finds each deliberate fault in the protocol within a stated number of seeds.

A fault is one small change to the real code, or to the modelled engine where the rule is the engine's. Run with
`-s` or `-rP` to read how many seeds each took.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from bus.coordinator import Coordinator
from bus.deliveries import Deliveries
from bus.engine import Loaded
from bus.events import AdapterLoaded, AdapterReceived, Attempt, Envelope, Event, Peer, Served, VersionCommitted
from bus.membership import Membership, Participation
from bus.participant import Participant
from bus.protocol import Answer, Effect, Load, UpdateState
from bus.update import Update
from rollout_node.versions import Resident, Stage, VersionTable
from tools.simulation.controller import ControllerProcess
from tools.simulation.engine import ModelledEngine
from tools.simulation.network import encoded
from tools.simulation.run import simulate

NODES = 5


def first_violation(seeds: int) -> tuple[int, str]:
    """How many seeds it took until an invariant broke, and which; fails if none did."""
    for seed in range(seeds):
        outcome = simulate(seed, NODES)
        if outcome.violation:
            return seed + 1, outcome.violation
    pytest.fail(f"not found within {seeds} seeds")


def answered_once(state: UpdateState, answered: str) -> Any:
    """`Update.waiting_for` that is content with one answer in a state."""
    honest: Any = Update.waiting_for
    return property(
        lambda self: [] if self.state is state and getattr(self, answered) else honest.fget(self)  # one is enough
    )


def commit_on_the_first_confirm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Update, "waiting_for", answered_once(UpdateState.LOADING, "loaded"))


def transfer_on_the_first_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Update, "waiting_for", answered_once(UpdateState.ANNOUNCED, "ready"))


def no_digest_check(patch: pytest.MonkeyPatch) -> None:
    """Neither the node nor the controller compares what arrived with the manifest."""

    def on_received(self: Participant, event: AdapterReceived, attempt: Attempt, digest: str) -> list[Effect]:
        return [Answer(event), Load(attempt)] if self._step(attempt, AdapterReceived) else []

    def believing(honest: Callable[..., None]) -> Callable[..., None]:
        def handle(self: Deliveries, event: AdapterReceived | AdapterLoaded, peer: Participation, now: float) -> None:
            update = self._current(event.attempt, peer.peer.node)
            if update is not None:
                honest(self, replace(event, digest=update.manifest.digest), peer, now)

        return handle

    patch.setattr(Participant, "_on_received", on_received)
    patch.setattr(Deliveries, "on_received", believing(Deliveries.on_received))
    patch.setattr(Deliveries, "on_loaded", believing(Deliveries.on_loaded))


def a_stale_view_accepted(patch: pytest.MonkeyPatch) -> None:
    def current(self: Deliveries, attempt: Attempt, node: str) -> Update | None:
        for update in self._active.values():
            same = (update.adapter, update.version) == (attempt.adapter, attempt.version)
            if same and node in update.participants:
                return update
        return None

    patch.setattr(Deliveries, "_current", current)


def a_stale_incarnation_accepted(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Membership, peer: Peer, now: float) -> Participation | None:
        participation = self._live.get(peer.node)
        if participation is not None:
            participation.heard_at = now
        return participation

    patch.setattr(Membership, "heard", heard)


def a_burned_number_used_again(patch: pytest.MonkeyPatch) -> None:
    honest = Deliveries._publish_abort

    def publish_abort(self: Deliveries, update: Update, *details: Any) -> None:
        honest(self, update, *details)
        if update.state is UpdateState.ABORTED:
            self._newest[update.adapter] = update.version - 1

    patch.setattr(Deliveries, "_publish_abort", publish_abort)


def publish_before_journal(patch: pytest.MonkeyPatch) -> None:
    def publish(self: ControllerProcess, event: Event) -> None:
        sequence = self._journal.sequence + 1
        self._announce(event, encoded(Envelope(self.run, sequence, event, self._published)))
        self._published = sequence
        self._moment()
        self._append(event)

    patch.setattr(ControllerProcess, "_publish", publish)


def an_abort_forgotten_on_one_path(patch: pytest.MonkeyPatch) -> None:
    """An update whose transfer runs out of time ends without a word."""
    honest = Deliveries._publish_abort

    def publish_abort(self: Deliveries, update: Update, phase: Any, *details: Any) -> None:
        if UpdateState.LOADING not in update.entered or update.state is not UpdateState.ABORTED:
            honest(self, update, phase, *details)

    patch.setattr(Deliveries, "_publish_abort", publish_abort)


def the_alias_flipped_at_load(patch: pytest.MonkeyPatch) -> None:
    honest = ModelledEngine.load

    def load(self: ModelledEngine, attempt: Attempt) -> Generator[Any, Any, Loaded]:
        loaded = yield from honest(self, attempt)
        resident = self._versions.find(attempt)
        assert resident is not None
        self.alias[attempt.adapter] = resident
        return loaded

    patch.setattr(ModelledEngine, "load", load)


def a_joiner_serving_before_it_has_the_head(patch: pytest.MonkeyPatch) -> None:
    """A node believes to serve whatever it hears was committed."""
    honest = Participant.handle

    def handle(self: Participant, event: Event, now: float) -> list[Effect]:
        if isinstance(event, VersionCommitted) and event.attempt.adapter not in self._replicas:
            attempt = event.attempt
            self.served[attempt.adapter] = Served(attempt.adapter, attempt.version, event.digest)
        return honest(self, event, now)

    patch.setattr(Participant, "handle", handle)


def a_quorum_that_counts_the_dead(patch: pytest.MonkeyPatch) -> None:
    honest = Update.can_do_without

    def can_do_without(self: Update, nodes: Iterable[str]) -> bool:
        left_out, self.left_out = self.left_out, {}
        try:
            return honest(self, [])
        finally:
            self.left_out = left_out

    patch.setattr(Update, "can_do_without", can_do_without)


def a_retired_version_dropped_while_in_use(patch: pytest.MonkeyPatch) -> None:
    def unused(self: VersionTable) -> list[Resident]:
        return [one for one in self._residents.values() if one.stage in (Stage.UNUSED, Stage.DRAINING)]

    patch.setattr(VersionTable, "unused", unused)


def the_journal_not_read_at_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "restore", lambda self, events: [])


def two_updates_of_a_source_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deliveries, "is_busy", lambda self, source: False)


def the_dead_never_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "expired", lambda self, now: [])
    patch.setattr(Membership, "next_expiry", lambda self: None)


@pytest.mark.parametrize(
    ("fault", "invariants", "seeds"),
    [
        (commit_on_the_first_confirm, {"I3"}, 20),
        (transfer_on_the_first_ready, {"I4"}, 20),
        (no_digest_check, {"I1", "I3"}, 300),
        (a_stale_view_accepted, {"I3", "I4"}, 1000),
        (a_stale_incarnation_accepted, {"I3", "I4", "I6"}, 300),
        (a_burned_number_used_again, {"I7"}, 100),
        (publish_before_journal, {"I7"}, 5),
        (an_abort_forgotten_on_one_path, {"I6"}, 300),
        (the_alias_flipped_at_load, {"I1"}, 20),
        (a_joiner_serving_before_it_has_the_head, {"I1", "I6"}, 50),
        (a_quorum_that_counts_the_dead, {"I3"}, 300),
        (a_retired_version_dropped_while_in_use, {"I8"}, 300),
        (the_journal_not_read_at_start, {"I7"}, 100),
        (two_updates_of_a_source_at_once, {"I3", "I5", "I6", "I7"}, 100),
        (the_dead_never_noticed, {"I6"}, 100),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_simulation_finds(
    fault: Callable[[pytest.MonkeyPatch], None], invariants: set[str], seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    took, violation = first_violation(seeds)
    print(f"{fault.__name__}: found after {took} of at most {seeds} seeds, {violation}")
    assert violation.partition(":")[0] in invariants
