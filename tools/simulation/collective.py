"""The data plane, modelled: groups that form only if every member comes, transfers that take all of an audience.

A transfer ends well for a rank only if the source and the whole audience entered the same attempt in the same
group. A member that dies or leaves breaks it for those who are inside. Bytes are their own digest here: what
arrives wrong has another.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bus.errors import RendezvousFailed, TransferFailed
from bus.events import Attempt, TransferStarted, ViewProposed
from tools.simulation.world import Waiting

if TYPE_CHECKING:
    from tools.simulation.faults import Plan
    from tools.simulation.invariants import Invariants
    from tools.simulation.peer import PeerProcess


@dataclass(slots=True)
class Inside:
    """One rank inside a transfer: what it waits for, and what it sends, if it is the source."""

    process: PeerProcess
    waiting: Waiting
    content: str | None


@dataclass(slots=True)
class Transfer:
    """Those inside one attempt's transfer, by node."""

    audience: tuple[str, ...]
    ranks: dict[str, Inside] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Group:
    """One view's group on one source's store."""

    proposal: ViewProposed
    traces: set[str] = field(default_factory=set)
    """The nodes that left their key in the store, dead or alive."""
    coming: dict[PeerProcess, Waiting] = field(default_factory=dict)
    seated: list[PeerProcess] = field(default_factory=list)
    transfers: dict[Attempt, Transfer] = field(default_factory=dict)


class Collective:
    """Every group of a world."""

    def __init__(self, plan: Plan, invariants: Invariants) -> None:
        self._plan = plan
        self._invariants = invariants
        self._groups: dict[tuple[str, int], Group] = {}

    # --------------------------------------------------------------------------------------- groups

    def join(self, process: PeerProcess, proposal: ViewProposed) -> Generator[float | Waiting, None, None]:
        """Enter a group and wait for all others; raises `RendezvousFailed`."""
        group = self._groups.setdefault((proposal.store, proposal.view), Group(proposal))
        fate = self._plan.fate("join", process.name)
        if fate == "fails":
            raise RendezvousFailed(proposal.view, (), proposal.timeout, "injected")
        if fate != "hangs":
            yield self._plan.duration("join")
            group.traces.add(process.node)
            waiting = group.coming[process] = Waiting(process)
            self._form_if_complete(group)
            process.after(proposal.timeout, self._give_up_joining, group, process, waiting)
            yield waiting
        else:
            yield proposal.timeout
            raise self._no_group(group)

    def _form_if_complete(self, group: Group) -> None:
        if {process.node for process in group.coming} == {member.node for member in group.proposal.members}:
            for process, waiting in group.coming.items():
                group.seated.append(process)
                waiting.succeed(delay=self._plan.duration("latency"))
            group.coming.clear()

    def _give_up_joining(self, group: Group, process: PeerProcess, waiting: Waiting) -> None:
        if group.coming.get(process) is waiting:
            del group.coming[process]
            waiting.fail(self._no_group(group))

    def _no_group(self, group: Group) -> RendezvousFailed:
        members = group.proposal.members
        missing = tuple(rank for rank, member in enumerate(members) if member.node not in group.traces)
        return RendezvousFailed(group.proposal.view, missing, group.proposal.timeout)

    def leave(self, process: PeerProcess, view: int | None = None) -> None:
        """Give up a process's place in a view, or in all; whoever is in a transfer with it notices."""
        for group in self._groups.values():
            if view is None or group.proposal.view == view:
                group.coming.pop(process, None)
                self._vacate(group, process)

    def _vacate(self, group: Group, process: PeerProcess) -> None:
        if process not in group.seated:
            return
        group.seated.remove(process)
        for attempt, transfer in [*group.transfers.items()]:
            if process.node in (group.proposal.source, *transfer.audience):
                del group.transfers[attempt]
                for rank in transfer.ranks.values():
                    if rank.process is not process:
                        error = TransferFailed(attempt.view, f"connection closed by {process.node}")
                        rank.waiting.fail(error, delay=self._plan.duration("latency"))
                        self._vacate(group, rank.process)

    # ------------------------------------------------------------------------------------- transfers

    def transfer(
        self, process: PeerProcess, proposal: ViewProposed | None, started: TransferStarted, content: str | None = None
    ) -> Generator[float | Waiting, str, str]:
        """Send `content`, or take what the source sends; what this rank ends up with. Raises `TransferFailed`."""
        view = started.attempt.view
        group = self._groups.get((proposal.store, view)) if proposal is not None else None
        if group is None or process not in group.seated:
            raise TransferFailed(view, "this process is in no group of that view; join a new view")
        fate = self._plan.fate("transfer", process.name)
        if fate == "fails":
            self._vacate(group, process)
            raise TransferFailed(view, "injected")
        waiting = Waiting(process)
        process.after(started.timeout, self._give_up, group, started, process, waiting)
        if fate != "hangs":
            self._enter(group, started, Inside(process, waiting, content))
        try:
            received = yield waiting
        except GeneratorExit:
            self._vacate(group, process)
            raise
        return f"{received}~" if fate == "wrong bytes" and content is None else received

    def _enter(self, group: Group, started: TransferStarted, inside: Inside) -> None:
        attempt = started.attempt
        others = [other for other in group.transfers if other != attempt]
        self._invariants.entered(inside.process.peer, started, others)
        transfer = group.transfers.setdefault(attempt, Transfer(started.audience))
        transfer.ranks[inside.process.node] = inside
        content = next((rank.content for rank in transfer.ranks.values() if rank.content is not None), None)
        if content is not None and {*transfer.audience, group.proposal.source} <= transfer.ranks.keys():
            del group.transfers[attempt]
            for rank in transfer.ranks.values():
                rank.waiting.succeed(content, delay=self._plan.duration("transfer"))

    def _give_up(self, group: Group, started: TransferStarted, process: PeerProcess, waiting: Waiting) -> None:
        if not waiting.over:
            waiting.fail(TransferFailed(started.attempt.view, f"took longer than {started.timeout:g} s"))
            self._vacate(group, process)
