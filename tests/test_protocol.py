"""The tables: every state, every signal; and what the coordinator and the participant do by them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest

from bus.coordinator import Coordinator
from bus.errors import ProtocolError
from bus.events import (
    AdapterLoaded,
    AdapterReceived,
    Attempt,
    Event,
    JoinAccepted,
    JoinRefused,
    JoinRequested,
    LayoutDeclared,
    LoadFailed,
    Member,
    NodeAlive,
    NodeLost,
    NodeQuarantined,
    NodeReady,
    NodeRefused,
    Outcome,
    Peer,
    PeerUnknown,
    Phase,
    Policy,
    PublishRefused,
    PublishRequested,
    Reason,
    Role,
    Served,
    SnapshotRequested,
    TransferFailed,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    UpdateCompleted,
    VersionActivated,
    VersionCommitted,
    ViewAbandoned,
    ViewFormed,
    ViewJoined,
    ViewProposed,
)
from bus.manifest import AdapterManifest
from bus.participant import Participant, Source
from bus.protocol import (
    REPLICA,
    UPDATE,
    VIEW,
    Activate,
    Answer,
    DeadlinePassed,
    Discard,
    JoinGroup,
    LeaveGroup,
    Load,
    Prepare,
    Publish,
    Receive,
    ReplicaState,
    Resolve,
    Send,
    Signal,
    Transmit,
    UpdateState,
    ViewState,
    next_state,
)
from tests.fakes import capabilities, layout

TRAINER = Peer("trainer", "t1")
LAYOUT = layout()
MANIFEST = AdapterManifest.of(LAYOUT, "blake3:aa")

# ------------------------------------------------------------------------------------------ tables

TABLES: list[Any] = [(UpdateState, UPDATE), (ViewState, VIEW), (ReplicaState, REPLICA)]


@pytest.mark.parametrize(("states", "table"), TABLES, ids=["update", "view", "replica"])
def test_every_state_has_a_row_and_every_step_leads_to_a_state(
    states: type[StrEnum], table: Mapping[StrEnum, Mapping[Signal, StrEnum]]
) -> None:
    assert set(table) == set(states)
    assert {state for row in table.values() for state in row.values()} <= set(states)


@pytest.mark.parametrize(("states", "table"), TABLES, ids=["update", "view", "replica"])
def test_every_state_takes_just_the_signals_of_its_row(
    states: type[StrEnum], table: Mapping[StrEnum, Mapping[Signal, StrEnum]]
) -> None:
    signals = {signal for row in table.values() for signal in row}
    for state in states:
        for signal in signals:
            if signal in table[state]:
                assert next_state(table, state, signal) is table[state][signal]
            else:
                with pytest.raises(ProtocolError, match=f"{signal.__name__} is not accepted while {state}"):
                    next_state(table, state, signal)


@pytest.mark.parametrize(("states", "table"), TABLES, ids=["update", "view", "replica"])
def test_every_state_can_be_reached_and_left_or_is_an_end(
    states: type[StrEnum], table: Mapping[StrEnum, Mapping[Signal, StrEnum]]
) -> None:
    first = next(iter(states))
    reached, grown = {first}, True
    while grown:
        more = {target for state in reached for target in table[state].values()} - reached
        grown = bool(more)
        reached |= more
    ends = {state for state in states if not table[state]}
    assert reached | {ReplicaState.PREPARING} >= set(states)
    assert ends
    for state in set(states) - ends:
        assert set(table[state].values()) - {state}


# ------------------------------------------------------------------------------------- coordinator


class Fleet:
    """A coordinator with a trainer and nodes that joined, and a view that formed; `now` moves by hand."""

    def __init__(self, *nodes: str) -> None:
        self.now = 100.0
        self.coordinator = Coordinator("run", "tcp://127.0.0.1:1")
        self.peers = {node: Peer(node, "i1") for node in nodes}
        self.said: list[Event] = []
        self.join(JoinRequested(TRAINER, Role.TRAINER, ("policy",), store="127.0.0.1:9"))
        for peer in self.peers.values():
            self.join(JoinRequested(peer, Role.ROLLOUT, capabilities=capabilities()))
        self.form_view()
        self.tell(TRAINER, LayoutDeclared(LAYOUT.digest, LAYOUT.body))

    def tell(self, peer: Peer, event: Event) -> list[Event]:
        """Hand an event in; returns what was published or sent because of it."""
        effects = self.coordinator.handle(event, peer, self.now)
        said = [effect.event for effect in effects if isinstance(effect, (Publish, Send))]
        self.said += said
        return said

    def wait(self, seconds: float, *, silent: tuple[str, ...] = ()) -> list[Event]:
        """Let time pass in small steps while all but the silent ones send heartbeats."""
        said: list[Event] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            for peer in (TRAINER, *self.peers.values()):
                if peer.node not in silent:
                    said += self.tell(peer, NodeAlive(peer, 0))
            effects = self.coordinator.handle_time(self.now)
            due = [effect.event for effect in effects if isinstance(effect, (Publish, Send))]
            said += due
            self.said += due
        return said

    def join(self, event: JoinRequested) -> list[Event]:
        said = self.tell(event.peer, event)
        return said + self.tell(event.peer, SnapshotRequested(event.peer))

    def form_view(self) -> int:
        """Let every member of each view that is proposed join it, until none is."""
        proposal = next(event for event in reversed(self.said) if isinstance(event, ViewProposed))
        for node in dict.fromkeys(member.node for member in proposal.members):
            self.tell(TRAINER if node == "trainer" else self.peers[node], ViewJoined(proposal.view, self.peer(node)))
        latest = next(event for event in reversed(self.said) if isinstance(event, ViewProposed))
        return proposal.view if latest is proposal else self.form_view()

    def peer(self, node: str) -> Peer:
        return TRAINER if node == "trainer" else self.peers[node]

    def publish(self, request: str = "r1", **how: Any) -> UpdateAnnounced:
        said = self.tell(TRAINER, PublishRequested(TRAINER, request, "policy", MANIFEST, 60.0, **how))
        return next(event for event in said if isinstance(event, UpdateAnnounced))

    def everyone(self, kind: type[Event], attempt: Attempt, *nodes: str) -> list[Event]:
        said: list[Event] = []
        for node in nodes or self.peers:
            peer = self.peers[node]
            event = {
                NodeReady: NodeReady(attempt, peer),
                AdapterReceived: AdapterReceived(attempt, peer, MANIFEST.digest, 0.1),
                AdapterLoaded: AdapterLoaded(attempt, peer, MANIFEST.digest, MANIFEST.tensors, MANIFEST.tensors, 0.1),
                VersionActivated: VersionActivated(attempt, peer, MANIFEST.digest),
            }[kind]
            said += self.tell(peer, event)
        return said

    def commit(self, request: str = "r1") -> UpdateCompleted:
        attempt = self.publish(request).attempt
        self.everyone(NodeReady, attempt)
        self.everyone(AdapterReceived, attempt)
        self.everyone(AdapterLoaded, attempt)
        said = self.everyone(VersionActivated, attempt)
        return next(event for event in said if isinstance(event, UpdateCompleted))


def only(kind: type[Event], events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def test_a_view_holds_the_source_as_rank_0_and_every_worker() -> None:
    fleet = Fleet("a")
    fleet.peers["b"] = Peer("b", "i1")
    said = fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities(workers=2)))
    (proposal,) = only(ViewProposed, said)
    assert isinstance(proposal, ViewProposed)
    assert proposal.members == (Member("trainer", 0), Member("a", 0), Member("b", 0), Member("b", 1))
    assert proposal.ranks("b") == (2, 3)


def test_the_transfer_starts_only_when_every_member_is_ready() -> None:
    """I4."""
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    assert not only(TransferStarted, fleet.everyone(NodeReady, attempt, "a"))
    assert only(TransferStarted, fleet.everyone(NodeReady, attempt, "b"))


def test_the_commit_waits_for_the_last_confirm() -> None:
    """I3."""
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    fleet.everyone(NodeReady, attempt)
    fleet.everyone(AdapterReceived, attempt)
    assert not only(VersionCommitted, fleet.everyone(AdapterLoaded, attempt, "a"))
    assert only(VersionCommitted, fleet.everyone(AdapterLoaded, attempt, "b"))


def test_a_node_may_have_loaded_before_another_has_received() -> None:
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    fleet.everyone(NodeReady, attempt)
    fleet.everyone(AdapterReceived, attempt, "a")
    fleet.everyone(AdapterLoaded, attempt, "a")
    fleet.everyone(AdapterReceived, attempt, "b")
    assert only(VersionCommitted, fleet.everyone(AdapterLoaded, attempt, "b"))


def test_a_completed_update_tells_its_phases_and_every_outcome() -> None:
    fleet = Fleet("a", "b")
    completed = fleet.commit()
    assert completed.attempt.version == 1
    assert [outcome.outcome for outcome in completed.outcomes] == [Outcome.ACTIVATED, Outcome.ACTIVATED]
    assert completed.phases.total == completed.phases.ready + completed.phases.transfer + completed.phases.load


@pytest.mark.parametrize("other", [{"version": 99}, {"number": 99}, {"view": 99}, {"adapter": "other"}])
def test_an_answer_for_another_attempt_is_dropped_and_counted(other: dict[str, Any]) -> None:
    fleet = Fleet("a")
    attempt = fleet.publish().attempt
    assert not fleet.everyone(NodeReady, replace(attempt, **other))
    assert fleet.coordinator.counters["stale"] == 1
    assert only(TransferStarted, fleet.everyone(NodeReady, attempt))


def test_an_answer_of_an_earlier_incarnation_is_refused() -> None:
    """B015."""
    fleet = Fleet("a")
    past = fleet.peers["a"]
    fleet.peers["a"] = Peer("a", "i2")
    fleet.join(JoinRequested(fleet.peers["a"], Role.ROLLOUT, capabilities=capabilities()))
    fleet.form_view()
    attempt = fleet.publish().attempt
    (answer,) = fleet.tell(past, NodeReady(attempt, past))
    assert isinstance(answer, JoinRefused)
    assert answer.reason is Reason.NAME_TAKEN


def test_the_last_word_of_a_dead_process_does_not_turn_its_successor_out() -> None:
    """Two joins under one name: whoever is heard again has the place."""
    fleet = Fleet("a")
    dead, alive = Peer("a", "i2"), Peer("a", "i3")
    fleet.join(JoinRequested(alive, Role.ROLLOUT, capabilities=capabilities()))
    fleet.tell(dead, JoinRequested(dead, Role.ROLLOUT, capabilities=capabilities()))
    assert not only(JoinRefused, fleet.tell(alive, NodeAlive(alive, 5)))


def test_a_node_that_joined_anew_after_the_commit_is_caught_up_at_once() -> None:
    """Being lost is no failure to take a version."""
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, attempt)
    fleet.everyone(VersionActivated, attempt, "a")
    fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities()))
    fleet.form_view()
    announced = only(UpdateAnnounced, fleet.said)[-1]
    assert isinstance(announced, UpdateAnnounced)
    assert (announced.catch_up, announced.audience) == (True, ("b",))


def test_the_same_answer_twice_changes_nothing() -> None:
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    fleet.everyone(NodeReady, attempt, "a")
    assert not fleet.everyone(NodeReady, attempt, "a")
    assert only(TransferStarted, fleet.everyone(NodeReady, attempt, "b"))


def test_the_same_request_twice_is_one_update() -> None:
    fleet = Fleet("a")
    fleet.publish()
    assert not fleet.tell(TRAINER, PublishRequested(TRAINER, "r1", "policy", MANIFEST, 60.0))


def test_a_second_publish_waits_for_the_first() -> None:
    """I5."""
    fleet = Fleet("a")
    attempt = fleet.publish("r1").attempt
    assert not only(UpdateAnnounced, fleet.tell(TRAINER, PublishRequested(TRAINER, "r2", "policy", MANIFEST, 60.0)))
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, attempt)
    (second,) = only(UpdateAnnounced, fleet.everyone(VersionActivated, attempt))
    assert isinstance(second, UpdateAnnounced)
    assert second.attempt.version == 2


@pytest.mark.parametrize(
    ("phase", "answer", "reason"),
    [
        (Phase.READY, lambda attempt, peer: NodeRefused(attempt, peer, Reason.NO_FREE_SLOT, "4 of 4"), "no_free_slot"),
        (Phase.TRANSFER, lambda attempt, peer: AdapterReceived(attempt, peer, "blake3:bb", 0.1), "digest_mismatch"),
        (Phase.LOAD, lambda attempt, peer: LoadFailed(attempt, peer, Reason.ENGINE_FAILED, "no"), "engine_failed"),
        (
            Phase.LOAD,
            lambda attempt, peer: AdapterLoaded(attempt, peer, MANIFEST.digest, 3, 4, 0.1),
            "modules_unmatched",
        ),
        (Phase.LOAD, lambda attempt, peer: AdapterLoaded(attempt, peer, "blake3:bb", 4, 4, 0.1), "digest_mismatch"),
    ],
)
def test_a_no_in_any_phase_ends_the_update_and_names_node_phase_and_reason(
    phase: Phase, answer: object, reason: str
) -> None:
    """B009, B011, B092: never a bare success."""
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    for kind, before in ((NodeReady, Phase.TRANSFER), (AdapterReceived, Phase.LOAD)):
        if phase in (before, Phase.LOAD) and (kind is NodeReady or phase is Phase.LOAD):
            fleet.everyone(kind, attempt)
    said = fleet.tell(fleet.peers["b"], answer(attempt, fleet.peers["b"]))  # type: ignore[operator]
    (aborted,) = only(UpdateAborted, said)
    assert isinstance(aborted, UpdateAborted)
    assert (aborted.node, aborted.phase, aborted.reason, aborted.final) == ("b", phase, reason, True)
    assert not only(VersionCommitted, fleet.said)


def test_a_failed_number_is_burned() -> None:
    fleet = Fleet("a")
    attempt = fleet.publish().attempt
    fleet.tell(fleet.peers["a"], NodeRefused(attempt, fleet.peers["a"], Reason.ENGINE_FAILED, "no"))
    assert fleet.publish("r2").attempt.version == 2


def test_a_node_that_dies_costs_an_attempt_and_the_rest_get_the_version() -> None:
    """B017."""
    fleet = Fleet("a", "b")
    first = fleet.publish().attempt
    fleet.everyone(NodeReady, first)
    said = fleet.wait(3.5, silent=("b",))
    assert only(NodeLost, said)
    (aborted,) = only(UpdateAborted, said)
    assert isinstance(aborted, UpdateAborted)
    assert (aborted.node, aborted.phase, aborted.final) == ("b", Phase.TRANSFER, False)
    (proposal,) = only(ViewProposed, said)
    assert isinstance(proposal, ViewProposed)
    assert proposal.members == (Member("trainer", 0), Member("a", 0))
    fleet.tell(TRAINER, ViewJoined(proposal.view, TRAINER))
    (again,) = only(UpdateAnnounced, fleet.tell(fleet.peers["a"], ViewJoined(proposal.view, fleet.peers["a"])))
    assert isinstance(again, UpdateAnnounced)
    assert again.attempt == Attempt("policy", 1, 2, proposal.view)
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, again.attempt, "a")
    (completed,) = only(UpdateCompleted, fleet.everyone(VersionActivated, again.attempt, "a"))
    assert isinstance(completed, UpdateCompleted)
    assert {outcome.node: (outcome.outcome, outcome.phase) for outcome in completed.outcomes} == {
        "a": (Outcome.ACTIVATED, Phase.COMMIT),
        "b": (Outcome.LOST, Phase.TRANSFER),
    }


def test_a_node_lost_between_two_updates_is_named_by_the_next_one_only() -> None:
    fleet = Fleet("a", "b")
    fleet.commit("r1")
    fleet.wait(3.5, silent=("b",))
    del fleet.peers["b"]
    fleet.form_view()
    named, again = fleet.commit("r2"), fleet.commit("r3")
    assert [(o.node, o.outcome, o.phase) for o in named.outcomes] == [
        ("a", Outcome.ACTIVATED, Phase.COMMIT),
        ("b", Outcome.LOST, Phase.QUEUE),
    ]
    assert [outcome.node for outcome in again.outcomes] == ["a"]


def test_a_lost_node_is_named_to_those_whose_adapter_it_followed() -> None:
    """Another adapter's update must neither name a stranger nor use the news up."""
    fleet = Fleet("a", "b")
    fleet.commit("r1")
    other = Peer("other", "t2")
    stranger = Peer("c", "i1")
    fleet.join(JoinRequested(other, Role.TRAINER, ("math",), store="127.0.0.1:8"))
    fleet.join(JoinRequested(stranger, Role.ROLLOUT, ("math",), capabilities=capabilities()))
    fleet.wait(3.5, silent=("b", "c"))
    del fleet.peers["b"]
    fleet.form_view()
    assert [outcome.node for outcome in fleet.commit("r2").outcomes] == ["a", "b"]


def test_a_node_whose_death_shows_first_as_a_broken_group_is_named_too() -> None:
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    fleet.everyone(NodeReady, attempt)
    fleet.tell(TRAINER, TransferFailed(attempt, TRAINER, "connection closed by peer"))
    fleet.wait(3.5, silent=("b",))
    fleet.form_view()
    announced = only(UpdateAnnounced, fleet.said)[-1]
    assert isinstance(announced, UpdateAnnounced)
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, announced.attempt, "a")
    (completed,) = only(UpdateCompleted, fleet.everyone(VersionActivated, announced.attempt, "a"))
    assert isinstance(completed, UpdateCompleted)
    assert {outcome.node: (outcome.outcome, outcome.phase) for outcome in completed.outcomes} == {
        "a": (Outcome.ACTIVATED, Phase.COMMIT),
        "b": (Outcome.LOST, Phase.TRANSFER),
    }


def test_a_broken_group_is_never_used_again() -> None:
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    fleet.everyone(NodeReady, attempt)
    said = fleet.tell(TRAINER, TransferFailed(attempt, TRAINER, "connection closed"))
    assert only(ViewAbandoned, said)
    (proposal,) = only(ViewProposed, said)
    assert isinstance(proposal, ViewProposed)
    assert proposal.view > attempt.view


def test_a_group_that_breaks_every_time_ends_the_update() -> None:
    fleet = Fleet("a")
    attempt = fleet.publish().attempt
    for _ in range(3):
        fleet.everyone(NodeReady, attempt)
        fleet.tell(TRAINER, TransferFailed(attempt, TRAINER, "connection closed"))
        fleet.form_view()
        announced = only(UpdateAnnounced, fleet.said)[-1]
        assert isinstance(announced, UpdateAnnounced)
        attempt = announced.attempt
    aborted = only(UpdateAborted, fleet.said)[-1]
    assert isinstance(aborted, UpdateAborted)
    assert (aborted.attempt.number, aborted.final, aborted.reason) == (3, True, Reason.GROUP_BROKEN)


@pytest.mark.parametrize(
    ("steps", "phase", "seconds"),
    [
        ((), Phase.READY, 10.5),
        ((NodeReady,), Phase.TRANSFER, 6.0),
        ((NodeReady, AdapterReceived), Phase.LOAD, 30.5),
    ],
)
def test_a_deadline_names_who_kept_the_others_waiting(
    steps: tuple[type[Event], ...], phase: Phase, seconds: float
) -> None:
    fleet = Fleet("a", "b")
    attempt = fleet.publish().attempt
    for kind in steps:
        fleet.everyone(kind, attempt)
    last = {0: NodeReady, 1: AdapterReceived, 2: AdapterLoaded}[len(steps)]
    fleet.everyone(last, attempt, "a")
    (aborted,) = only(UpdateAborted, fleet.wait(seconds))
    assert isinstance(aborted, UpdateAborted)
    assert (aborted.node, aborted.phase, aborted.reason) == ("b", phase, Reason.DEADLINE_PASSED)


def test_a_lost_trainer_ends_its_update_and_frees_its_adapter() -> None:
    fleet = Fleet("a")
    fleet.publish()
    (aborted,) = only(UpdateAborted, fleet.wait(3.5, silent=("trainer",)))
    assert isinstance(aborted, UpdateAborted)
    assert aborted.reason is Reason.SOURCE_LOST
    heir = Peer("other", "t2")
    said = fleet.join(JoinRequested(heir, Role.TRAINER, ("policy",), store="127.0.0.1:9"))
    assert only(JoinAccepted, said)


def test_a_second_live_trainer_of_an_adapter_is_refused_by_name() -> None:
    fleet = Fleet("a")
    rival = Peer("rival", "t2")
    (refused,) = fleet.tell(rival, JoinRequested(rival, Role.TRAINER, ("policy",)))
    assert isinstance(refused, JoinRefused)
    assert (refused.reason, "trainer" in refused.detail) == (Reason.ADAPTER_TAKEN, True)


def test_only_the_trainer_of_an_adapter_may_publish_it() -> None:
    fleet = Fleet("a")
    (refused,) = fleet.tell(fleet.peers["a"], PublishRequested(fleet.peers["a"], "r", "policy", MANIFEST, 60.0))
    assert isinstance(refused, PublishRefused)
    assert refused.reason is Reason.NOT_ALLOWED


def test_a_peer_that_hears_everything_is_followed_though_its_request_was_lost() -> None:
    fleet = Fleet("a")
    late = Peer("b", "i1")
    fleet.tell(late, JoinRequested(late, Role.ROLLOUT, capabilities=capabilities()))
    assert not only(ViewProposed, fleet.tell(late, NodeAlive(late, 0)))
    assert only(ViewProposed, fleet.tell(late, NodeAlive(late, 7)))


def test_an_unknown_peer_is_told_to_join() -> None:
    fleet = Fleet("a")
    stranger = Peer("stranger", "s")
    assert fleet.tell(stranger, NodeAlive(stranger, 0)) == [PeerUnknown(stranger)]


def test_a_late_joiner_is_brought_to_the_head_alone() -> None:
    fleet = Fleet("a")
    completed = fleet.commit()
    fleet.peers["b"] = Peer("b", "i1")
    fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities()))
    fleet.form_view()
    announced = only(UpdateAnnounced, fleet.said)[-1]
    assert isinstance(announced, UpdateAnnounced)
    assert (announced.catch_up, announced.audience) == (True, ("b",))
    assert (announced.attempt.version, announced.attempt.number) == (completed.attempt.version, 2)
    for kind in (NodeReady, AdapterReceived):
        fleet.everyone(kind, announced.attempt, "b")
    assert only(VersionCommitted, fleet.everyone(AdapterLoaded, announced.attempt, "b"))
    fleet.everyone(VersionActivated, announced.attempt, "b")
    assert not fleet.wait(2.0)


def test_a_node_that_was_away_for_some_versions_is_given_the_newest_only() -> None:
    """B085: nobody asks for a version that is gone."""
    fleet = Fleet("a")
    for request in ("r1", "r2", "r3"):
        fleet.commit(request)
    fleet.peers["b"] = Peer("b", "i1")
    served = (Served("policy", 1, MANIFEST.digest),)
    fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities(), served=served))
    fleet.form_view()
    announced = only(UpdateAnnounced, fleet.said)[-1]
    assert isinstance(announced, UpdateAnnounced)
    assert (announced.attempt.version, announced.audience) == (3, ("b",))


def test_a_node_that_fails_to_catch_up_is_not_tried_again_at_once() -> None:
    fleet = Fleet("a")
    fleet.commit()
    fleet.peers["b"] = Peer("b", "i1")
    fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities()))
    fleet.form_view()
    announced = only(UpdateAnnounced, fleet.said)[-1]
    assert isinstance(announced, UpdateAnnounced)
    refused = NodeRefused(announced.attempt, fleet.peers["b"], Reason.NO_FREE_SLOT, "4 of 4")
    assert not only(UpdateAnnounced, fleet.tell(fleet.peers["b"], refused))
    assert not only(UpdateAnnounced, fleet.wait(9.0))
    assert only(UpdateAnnounced, fleet.wait(2.0))


def test_a_restarted_node_that_still_serves_a_higher_version_moves_the_numbers_on() -> None:
    """B086: a fresh journal must not publish a number that a node has seen."""
    fleet = Fleet("a")
    fleet.peers["b"] = Peer("b", "i1")
    served = (Served("policy", 57, "blake3:cc"),)
    fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities(), served=served))
    fleet.form_view()
    assert fleet.publish().attempt.version == 58


def test_a_view_that_does_not_form_names_the_missing_and_goes_on_without_them() -> None:
    fleet = Fleet("a")
    fleet.peers["b"] = Peer("b", "i1")
    said = fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities()))
    (proposal,) = only(ViewProposed, said)
    assert isinstance(proposal, ViewProposed)
    for peer in (TRAINER, fleet.peers["a"]):
        fleet.tell(peer, ViewJoined(proposal.view, peer))
    said = fleet.wait(11.5)
    (abandoned, again) = (only(ViewAbandoned, said)[0], only(ViewProposed, said)[0])
    assert isinstance(abandoned, ViewAbandoned)
    assert isinstance(again, ViewProposed)
    assert abandoned.missing == ("b",)
    assert again.members == (Member("trainer", 0), Member("a", 0))


def test_a_restarted_controller_knows_heads_and_burns_what_was_in_flight() -> None:
    """I7."""
    fleet = Fleet("a")
    journal: list[Event] = [LayoutDeclared(LAYOUT.digest, LAYOUT.body)]
    fleet.commit()
    in_flight = fleet.publish("r2")
    journal += [event for event in fleet.said if not isinstance(event, JoinAccepted)]
    fresh = Coordinator("run2", "tcp://127.0.0.1:1")
    (effect,) = fresh.restore(journal)
    assert isinstance(effect, Publish)
    assert isinstance(effect.event, UpdateAborted)
    assert (effect.event.attempt, effect.event.reason) == (in_flight.attempt, Reason.CONTROLLER_RESTARTED)
    assert fresh.heads["policy"].served == Served("policy", 1, MANIFEST.digest)


def test_a_publish_that_was_committed_before_a_restart_is_told_its_end_again() -> None:
    """A trainer that asks again after a controller's restart must not publish the same bytes twice."""
    fleet = Fleet("a")
    completed = fleet.commit("r1")
    fresh = Coordinator("run2", "tcp://127.0.0.1:1")
    fresh.restore([LayoutDeclared(LAYOUT.digest, LAYOUT.body), *fleet.said])
    fresh.handle(JoinRequested(TRAINER, Role.TRAINER, ("policy",), store="127.0.0.1:9"), TRAINER, 0.0)
    again = fresh.handle(PublishRequested(TRAINER, "r1", "policy", MANIFEST, 60.0), TRAINER, 0.0)
    assert again == [Send(TRAINER, completed)]


def test_a_version_committed_just_before_a_crash_is_complete_after_it() -> None:
    fleet = Fleet("a")
    attempt = fleet.publish("r1").attempt
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, attempt)
    fresh = Coordinator("run2", "tcp://127.0.0.1:1")
    (effect,) = fresh.restore([LayoutDeclared(LAYOUT.digest, LAYOUT.body), *fleet.said])
    assert isinstance(effect, Publish)
    assert isinstance(effect.event, UpdateCompleted)
    assert (effect.event.attempt, effect.event.request) == (attempt, "r1")


# ---------------------------------------------------------------------------------------- policies


QUORUM: dict[str, Any] = {"policy": Policy.QUORUM}


def outcomes_of(events: list[Event]) -> dict[str, Outcome]:
    (completed,) = only(UpdateCompleted, events)
    assert isinstance(completed, UpdateCompleted)
    return {outcome.node: outcome.outcome for outcome in completed.outcomes}


@pytest.mark.parametrize("phase", [Phase.READY, Phase.TRANSFER, Phase.LOAD])
def test_under_quorum_a_no_leaves_one_node_out_and_the_rest_get_the_version(phase: Phase) -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(**QUORUM).attempt
    noes = {
        Phase.READY: NodeRefused(attempt, fleet.peers["c"], Reason.NO_FREE_SLOT, "4 of 4"),
        Phase.TRANSFER: AdapterReceived(attempt, fleet.peers["c"], "blake3:bb", 0.1),
        Phase.LOAD: LoadFailed(attempt, fleet.peers["c"], Reason.ENGINE_FAILED, "no"),
    }
    order = [(Phase.READY, NodeReady), (Phase.TRANSFER, AdapterReceived), (Phase.LOAD, AdapterLoaded)]
    left = ["a", "b", "c"]
    for here, kind in order:
        if here is phase:
            fleet.tell(fleet.peers["c"], noes[phase])
            left.remove("c")
        fleet.everyone(kind, attempt, *left)
    expected = Outcome.REFUSED if phase is Phase.READY else Outcome.FAILED
    said = fleet.everyone(VersionActivated, attempt, "a", "b")
    assert outcomes_of(said) == {"a": Outcome.ACTIVATED, "b": Outcome.ACTIVATED, "c": expected}


@pytest.mark.parametrize("phase", [Phase.READY, Phase.TRANSFER, Phase.LOAD])
def test_under_quorum_a_silent_node_is_left_out_at_the_deadline(phase: Phase) -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(**QUORUM).attempt
    answering = ["a", "b", "c"]
    for here, kind in [(Phase.READY, NodeReady), (Phase.TRANSFER, AdapterReceived), (Phase.LOAD, AdapterLoaded)]:
        if here is phase:
            fleet.everyone(kind, attempt, "a", "b")
            fleet.wait({Phase.READY: 10.5, Phase.TRANSFER: 5.5, Phase.LOAD: 30.5}[phase])
            answering.remove("c")
        else:
            fleet.everyone(kind, attempt, *answering)
    said = fleet.everyone(VersionActivated, attempt, "a", "b")
    assert outcomes_of(said)["c"] is Outcome.LATE


def test_a_node_left_out_of_a_transfer_is_not_in_its_audience() -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(**QUORUM).attempt
    fleet.tell(fleet.peers["b"], NodeRefused(attempt, fleet.peers["b"], Reason.NO_FREE_SLOT, "4 of 4"))
    (started,) = only(TransferStarted, fleet.everyone(NodeReady, attempt, "a", "c"))
    assert isinstance(started, TransferStarted)
    assert started.audience == ("a", "c")


def test_under_quorum_too_few_confirms_fail_the_update() -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(**QUORUM).attempt
    fleet.tell(fleet.peers["b"], NodeRefused(attempt, fleet.peers["b"], Reason.NO_FREE_SLOT, "4 of 4"))
    said = fleet.tell(fleet.peers["c"], NodeRefused(attempt, fleet.peers["c"], Reason.NO_FREE_SLOT, "4 of 4"))
    (aborted,) = only(UpdateAborted, said)
    assert isinstance(aborted, UpdateAborted)
    assert (aborted.node, aborted.final) == ("c", True)


def test_a_stated_quorum_is_counted_in_nodes() -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(policy=Policy.QUORUM, quorum=3).attempt
    said = fleet.tell(fleet.peers["c"], NodeRefused(attempt, fleet.peers["c"], Reason.NO_FREE_SLOT, "4 of 4"))
    assert only(UpdateAborted, said)


def test_a_node_left_out_is_brought_to_the_head_later() -> None:
    fleet = Fleet("a", "b", "c")
    attempt = fleet.publish(**QUORUM).attempt
    fleet.tell(fleet.peers["c"], NodeRefused(attempt, fleet.peers["c"], Reason.NO_FREE_SLOT, "4 of 4"))
    for kind in (NodeReady, AdapterReceived, AdapterLoaded, VersionActivated):
        fleet.everyone(kind, attempt, "a", "b")
    (again,) = only(UpdateAnnounced, fleet.wait(11.0))
    assert isinstance(again, UpdateAnnounced)
    assert (again.catch_up, again.audience) == (True, ("c",))


def test_supersede_takes_the_place_of_what_waits_and_not_of_what_travels() -> None:
    fleet = Fleet("a")
    attempt = fleet.publish("r1").attempt
    fleet.tell(TRAINER, PublishRequested(TRAINER, "r2", "policy", MANIFEST, 60.0))
    (refused,) = fleet.tell(TRAINER, PublishRequested(TRAINER, "r3", "policy", MANIFEST, 60.0, supersede=True))
    assert isinstance(refused, PublishRefused)
    assert (refused.request, refused.reason) == ("r2", Reason.SUPERSEDED)
    for kind in (NodeReady, AdapterReceived, AdapterLoaded):
        fleet.everyone(kind, attempt)
    (announced,) = only(UpdateAnnounced, fleet.everyone(VersionActivated, attempt))
    assert isinstance(announced, UpdateAnnounced)
    assert announced.request == "r3"


def test_a_publish_that_expires_in_the_queue_leaves_the_one_in_flight_alone() -> None:
    """I5: it held nobody up, and must not make way for a third."""
    fleet = Fleet("a")
    attempt = fleet.publish("r1").attempt
    for kind in (NodeReady, AdapterReceived):
        fleet.everyone(kind, attempt)
    fleet.tell(TRAINER, PublishRequested(TRAINER, "r2", "policy", MANIFEST, 2.0))
    fleet.tell(TRAINER, PublishRequested(TRAINER, "r3", "policy", MANIFEST, 60.0))
    said = fleet.wait(2.5)
    (refused,) = only(PublishRefused, said)
    assert isinstance(refused, PublishRefused)
    assert (refused.request, "waited behind policy@1" in refused.detail) == ("r2", True)
    assert not only(UpdateAnnounced, said)
    assert only(VersionCommitted, fleet.everyone(AdapterLoaded, attempt))


def test_the_queue_is_bounded() -> None:
    fleet = Fleet("a")
    fleet.publish("r0")
    said = [fleet.tell(TRAINER, PublishRequested(TRAINER, f"r{n}", "policy", MANIFEST, 60.0)) for n in range(1, 18)]
    refusals = [event.reason for events in said for event in events if isinstance(event, PublishRefused)]
    assert refusals == [Reason.QUEUE_FULL]


# -------------------------------------------------------------------------------------- quarantine


def test_a_node_that_is_lost_again_and_again_is_kept_out_and_said_so() -> None:
    """B118."""
    fleet = Fleet("a", "b")
    for incarnation in range(3):
        fleet.wait(3.5, silent=("b",))
        fleet.peers["b"] = Peer("b", f"again{incarnation}")
        fleet.join(JoinRequested(fleet.peers["b"], Role.ROLLOUT, capabilities=capabilities()))
        fleet.form_view()
    (quarantined,) = only(NodeQuarantined, fleet.said)
    assert isinstance(quarantined, NodeQuarantined)
    assert (quarantined.node, quarantined.losses, quarantined.seconds) == ("b", 3, 10.0)
    proposal = only(ViewProposed, fleet.said)[-1]
    assert isinstance(proposal, ViewProposed)
    assert {member.node for member in proposal.members} == {"trainer", "a"}
    (back,) = only(ViewProposed, fleet.wait(10.5))
    assert isinstance(back, ViewProposed)
    assert {member.node for member in back.members} == {"trainer", "a", "b"}


# ------------------------------------------------------------------------------------- participant


class Node:
    """A participant that is in view 1."""

    def __init__(self) -> None:
        self.peer = Peer("a", "i1")
        self.mind = Participant(self.peer)
        proposal = ViewProposed(1, "trainer", (Member("trainer", 0), Member("a", 0)), "s", 5.0)
        assert self.mind.handle(proposal, 0.0) == [JoinGroup(proposal)]
        self.mind.handle(ViewJoined(1, self.peer), 0.0)
        self.mind.handle(LayoutDeclared(LAYOUT.digest, LAYOUT.body), 0.0)

    def announce(self, version: int = 1, view: int = 1) -> UpdateAnnounced:
        return UpdateAnnounced(Attempt("policy", version, 1, view), "r", "trainer", ("a",), MANIFEST, 10.0)

    def reach(self, state: ReplicaState) -> Attempt:
        """Bring version 1 up to a state."""
        attempt = self.announce().attempt
        steps: list[tuple[ReplicaState, Event]] = [
            (ReplicaState.PREPARING, self.announce()),
            (ReplicaState.READY, NodeReady(attempt, self.peer)),
            (ReplicaState.RECEIVING, TransferStarted(attempt, ("a",), 5.0)),
            (ReplicaState.LOADING, AdapterReceived(attempt, self.peer, MANIFEST.digest, 0.1)),
            (ReplicaState.LOADED, AdapterLoaded(attempt, self.peer, MANIFEST.digest, 4, 4, 0.1)),
        ]
        for reached, event in steps:
            self.mind.handle(event, 0.0)
            if reached is state:
                break
        return attempt


def test_a_node_prepares_receives_loads_and_activates_in_that_order() -> None:
    node = Node()
    announced = node.announce()
    attempt = announced.attempt
    assert node.mind.handle(announced, 0.0) == [Prepare(announced, LAYOUT)]
    ready = NodeReady(attempt, node.peer)
    assert node.mind.handle(ready, 0.0) == [Answer(ready)]
    started = TransferStarted(attempt, ("a",), 5.0)
    assert node.mind.handle(started, 0.0) == [Receive(started)]
    received = AdapterReceived(attempt, node.peer, MANIFEST.digest, 0.1)
    assert node.mind.handle(received, 0.0) == [Answer(received), Load(attempt)]
    loaded = AdapterLoaded(attempt, node.peer, MANIFEST.digest, 4, 4, 0.1)
    assert node.mind.handle(loaded, 0.0) == [Answer(loaded)]
    assert "policy" not in node.mind.served
    assert node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0) == [Activate(attempt, MANIFEST.digest)]
    activated = VersionActivated(attempt, node.peer, MANIFEST.digest)
    assert node.mind.handle(activated, 0.0) == [Answer(activated)]
    assert node.mind.served["policy"].version == 1


@pytest.mark.parametrize("seed", range(200))
def test_events_of_two_versions_in_any_order_end_at_the_newer(seed: int) -> None:
    """B028: told twice, late or crosswise, a node's version never goes back, and nothing of the older one stays."""
    node, order = Node(), random.Random(seed)
    attempts = [node.announce(version).attempt for version in (5, 6)]
    pending: list[list[Event]] = [
        [
            node.announce(attempt.version),
            NodeReady(attempt, node.peer),
            TransferStarted(attempt, ("a",), 5.0),
            AdapterReceived(attempt, node.peer, MANIFEST.digest, 0.1),
            AdapterLoaded(attempt, node.peer, MANIFEST.digest, 4, 4, 0.1),
            VersionCommitted(attempt, MANIFEST.digest),
            VersionActivated(attempt, node.peer, MANIFEST.digest),
        ]
        for attempt in attempts
    ]
    pending[1].insert(0, UpdateAborted(attempts[0], Phase.LOAD, "b", Reason.NODE_LOST, "", final=True, seconds=1.0))
    versions = [0]
    while any(pending):
        queue = order.choice([events for events in pending if events])
        event = queue.pop(0)
        for told in [event, event] if order.random() < 0.3 else [event]:
            node.mind.handle(told, 0.0)
        versions.append(node.mind.served["policy"].version if "policy" in node.mind.served else 0)
    assert versions == sorted(versions)


def test_an_activation_that_a_new_announcement_overtook_is_still_known() -> None:
    node = Node()
    attempt = node.reach(ReplicaState.LOADED)
    node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0)
    node.mind.handle(node.announce(version=2), 0.0)
    activated = VersionActivated(attempt, node.peer, MANIFEST.digest)
    assert node.mind.handle(activated, 0.0) == [Answer(activated)]
    assert node.mind.served["policy"].version == 1


def test_a_late_activation_refuses_the_same_version_on_its_way_again() -> None:
    """A second copy would cost a slot, and the next version might find none."""
    node = Node()
    attempt = node.reach(ReplicaState.LOADED)
    node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0)
    again = replace(node.announce(), attempt=replace(attempt, number=2), catch_up=True)
    node.mind.handle(again, 0.0)
    effects = node.mind.handle(VersionActivated(attempt, node.peer, MANIFEST.digest), 0.0)
    assert Discard(again.attempt) in effects
    refused = [effect.event for effect in effects if isinstance(effect, Answer)][-1]
    assert isinstance(refused, NodeRefused)
    assert refused.reason is Reason.OUTDATED


def test_bytes_with_another_digest_are_never_loaded() -> None:
    """B092."""
    node = Node()
    attempt = node.reach(ReplicaState.RECEIVING)
    effects = node.mind.handle(AdapterReceived(attempt, node.peer, "blake3:bb", 0.1), 0.0)
    assert effects[0] == Discard(attempt)
    assert isinstance(effects[1], Answer)
    assert isinstance(effects[1].event, LoadFailed)
    assert effects[1].event.reason is Reason.DIGEST_MISMATCH


def test_an_update_in_a_view_that_a_node_is_not_in_is_refused() -> None:
    node = Node()
    effects = node.mind.handle(node.announce(view=9), 0.0)
    (answer,) = [effect for effect in effects if isinstance(effect, Answer)]
    assert isinstance(answer.event, NodeRefused)
    assert answer.event.reason is Reason.NOT_IN_VIEW


@pytest.mark.parametrize("state", [s for s in ReplicaState if UpdateAborted in REPLICA[s]])
def test_an_abort_in_any_state_drops_what_was_staged(state: ReplicaState) -> None:
    """B088."""
    node = Node()
    if state is ReplicaState.WAITING_FOR_LAYOUT:
        node.mind = Participant(node.peer)
        node.__init__()  # type: ignore[misc]  # a fresh node that has not heard of the layout
        node.mind._layouts.clear()
        node.mind.handle(node.announce(), 0.0)
        attempt = node.announce().attempt
    else:
        attempt = node.reach(state)
    aborted = UpdateAborted(attempt, Phase.LOAD, "b", Reason.ENGINE_FAILED, "", final=True, seconds=1.0)
    assert node.mind.handle(aborted, 0.0) == [Discard(attempt)]
    assert node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0) == []


def test_an_activation_that_never_comes_ends_at_its_deadline() -> None:
    node = Node()
    attempt = node.reach(ReplicaState.LOADED)
    node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0)
    deadline = node.mind.next_deadline()
    assert deadline is not None
    assert node.mind.handle_time(deadline) == [Discard(attempt)]
    assert node.mind.next_deadline() is None


@pytest.mark.parametrize("state", [s for s in ReplicaState if REPLICA[s]])
def test_every_state_of_a_replica_ends_in_time(state: ReplicaState) -> None:
    """A state that time does not end would leave a deadline in the past, and a shell that spins on it."""
    assert REPLICA[state][DeadlinePassed] is ReplicaState.DROPPED


def test_a_controller_that_falls_silent_does_not_leave_staged_bytes_behind() -> None:
    node = Node()
    attempt = node.reach(ReplicaState.LOADED)
    deadline = node.mind.next_deadline()
    assert deadline is not None
    assert node.mind.handle_time(deadline - 0.1) == []
    assert node.mind.handle_time(deadline) == [Discard(attempt)]


def test_a_new_controller_run_ends_groups_and_staging_but_not_serving() -> None:
    node = Node()
    attempt = node.reach(ReplicaState.LOADED)
    node.mind.handle(VersionCommitted(attempt, MANIFEST.digest), 0.0)
    node.mind.handle(VersionActivated(attempt, node.peer, MANIFEST.digest), 0.0)
    node.mind.handle(node.announce(version=2), 0.0)
    assert node.mind.reset() == [Discard(Attempt("policy", 2, 1, 1)), LeaveGroup(1)]
    assert node.mind.served["policy"].version == 1


def test_an_older_view_never_replaces_a_newer_one() -> None:
    node = Node()
    newer = ViewProposed(5, "trainer", (Member("trainer", 0), Member("a", 0)), "s", 5.0)
    assert node.mind.handle(newer, 0.0) == [LeaveGroup(1), JoinGroup(newer)]
    assert node.mind.handle(replace(newer, view=4), 0.0) == []


def test_a_view_formed_needs_no_answer() -> None:
    assert Node().mind.handle(ViewFormed(1, "trainer"), 0.0) == []


# ------------------------------------------------------------------------------------------ source


def test_a_source_sends_what_is_its_own_once_and_hears_how_it_ended() -> None:
    source = Source(TRAINER)
    proposal = ViewProposed(1, "trainer", (Member("trainer", 0), Member("a", 0)), "s", 5.0)
    assert source.handle(proposal) == [JoinGroup(proposal)]
    source.handle(ViewJoined(1, TRAINER))
    announced = UpdateAnnounced(Attempt("policy", 1, 1, 1), "r1", "trainer", ("a",), MANIFEST, 10.0)
    started = TransferStarted(announced.attempt, ("a",), 5.0)
    assert source.handle(started) == []
    source.handle(announced)
    assert source.handle(started) == [Transmit(started, announced, proposal)]
    assert source.handle(started) == []
    aborted = UpdateAborted(announced.attempt, Phase.LOAD, "a", Reason.ENGINE_FAILED, "", final=True, seconds=1.0)
    assert source.handle(aborted) == [Discard(announced.attempt), Resolve("r1", aborted)]
    assert source.handle(replace(aborted, final=False)) == [Discard(announced.attempt)]


def test_a_source_leaves_alone_what_another_trainer_sends() -> None:
    source = Source(TRAINER)
    announced = UpdateAnnounced(Attempt("policy", 1, 1, 1), "r1", "other", ("a",), MANIFEST, 10.0)
    source.handle(announced)
    assert source.handle(TransferStarted(announced.attempt, ("a",), 5.0)) == []


def test_a_snapshot_tells_a_peer_that_missed_events_what_it_has_a_part_in() -> None:
    """B008: a gap in what is published is filled by asking."""
    fleet = Fleet("a")
    fleet.commit()
    announced = fleet.publish("r2")
    said = fleet.tell(fleet.peers["a"], SnapshotRequested(fleet.peers["a"]))
    assert announced in said
    assert [event.attempt.version for event in said if isinstance(event, VersionCommitted)] == [1]
    (started,) = only(TransferStarted, fleet.everyone(NodeReady, announced.attempt))
    assert started in fleet.tell(TRAINER, SnapshotRequested(TRAINER))
