"""One version on its way through the fleet, and the newest that arrived: the coordinator's records. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bus.events import Attempt, NodeOutcome, Outcome, Phase, PhaseTimes, Policy, Served
from bus.manifest import AdapterManifest
from bus.protocol import PHASES, UpdateState


@dataclass(slots=True, eq=False)
class Update:
    """One version on its way: from its request to its end, over as many attempts as it takes."""

    request: str
    adapter: str
    source: str
    manifest: AdapterManifest
    requested_at: float
    expires_at: float
    policy: Policy = Policy.STRICT
    quorum: int = 0
    """How many nodes must confirm under the quorum policy; 0: a majority of the audience."""
    targets: tuple[str, ...] = ()
    """For a catch-up, the nodes that lack the head; empty for a publish, which is for all."""
    state: UpdateState = UpdateState.QUEUED
    version: int = 0
    number: int = 0
    view: int = 0
    audience: tuple[str, ...] = ()
    deadline: float = 0.0
    ready: set[str] = field(default_factory=set)
    received: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)
    activated: set[str] = field(default_factory=set)
    left_out: dict[str, NodeOutcome] = field(default_factory=dict)
    """Nodes that the update goes on without: lost on the way or, under the quorum policy, refusing or late."""
    broken_in: Phase = Phase.QUEUE
    """The phase that the last attempt broke off in."""
    entered: dict[UpdateState, float] = field(default_factory=dict)
    """When each state of the current attempt began."""

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.adapter, self.version, self.number, self.view)

    @property
    def phase(self) -> Phase:
        return PHASES[self.state]

    @property
    def due(self) -> float:
        """When time moves this update on, if nothing else does."""
        if self.state is UpdateState.COMMITTED:
            return self.deadline
        if self.state is UpdateState.QUEUED:
            return self.expires_at
        return min(self.deadline, self.expires_at)

    def begin_attempt(self, view: int, audience: tuple[str, ...], deadline: float) -> None:
        """Start over for another view: nothing that was answered before counts any more."""
        self.number += 1
        self.view = view
        self.audience = audience
        self.deadline = deadline
        self.ready, self.received, self.loaded, self.activated = set(), {}, {}, set()
        self.left_out = {node: outcome for node, outcome in self.left_out.items() if node not in audience}

    @property
    def participants(self) -> tuple[str, ...]:
        """The nodes of the audience that the update still goes to."""
        return tuple(node for node in self.audience if node not in self.left_out)

    @property
    def waiting_for(self) -> list[str]:
        """The nodes whose answer the current state waits for."""
        answered: Collection[str] = {
            UpdateState.ANNOUNCED: self.ready,
            UpdateState.TRANSFERRING: self.received,
            UpdateState.LOADING: self.loaded,
            UpdateState.COMMITTED: self.activated,
        }.get(self.state, ())
        return [node for node in self.participants if node not in answered]

    def can_do_without(self, nodes: Collection[str]) -> bool:
        """Whether the policy lets the update go on without these nodes of its participants."""
        if self.policy is Policy.STRICT:
            return False
        needed = self.quorum or len(self.audience) // 2 + 1
        return len(self.participants) - len(nodes) >= needed

    def phase_times(self, now: float) -> PhaseTimes:
        states = (UpdateState.ANNOUNCED, UpdateState.TRANSFERRING, UpdateState.LOADING, UpdateState.COMMITTED)
        starts = [self.entered[state] for state in states]
        ready, transfer, load, commit = (end - start for start, end in zip(starts, [*starts[1:], now], strict=True))
        return PhaseTimes(ready, transfer, load, commit, now - self.requested_at)

    def outcomes(self, late: list[str]) -> dict[str, NodeOutcome]:
        """What became of this update on each node of its audience, and on those it went on without."""
        outcomes = dict(self.left_out)
        for node in self.audience:
            if node not in outcomes:
                outcome = Outcome.LATE if node in late else Outcome.ACTIVATED
                detail = "did not confirm the activation in time" if node in late else ""
                outcomes[node] = NodeOutcome(
                    node, outcome, Phase.COMMIT, detail, self.received.get(node, 0.0), self.loaded.get(node, 0.0)
                )
        return outcomes


@dataclass(frozen=True, slots=True)
class Head:
    """The newest committed version of an adapter."""

    attempt: Attempt
    manifest: AdapterManifest

    @property
    def served(self) -> Served:
        return Served(self.attempt.adapter, self.attempt.version, self.manifest.digest)
