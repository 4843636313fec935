"""A peer's seat in the groups of its views: performs `JoinGroup` and `LeaveGroup`, and reports how joining ended."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from bus.errors import RendezvousFailed
from bus.events import Event, Peer, ViewFailed, ViewJoined, ViewProposed
from bus.protocol import JoinGroup, LeaveGroup
from bus.tasks import Lane

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT: float = 3.0
"""Seconds before a group that will not let go is left to its thread."""

JOIN_GRACE: float = 0.5
"""Seconds that we wait longer than the collective does: it can name those who never came, we only ourselves."""


class GroupMember:
    """`join` and `leave` touch the groups; `report` takes `ViewJoined` and `ViewFailed`. One lane for each view."""

    def __init__(
        self,
        peer: Peer,
        tasks: TaskGroup,
        *,
        join: Callable[[ViewProposed], Awaitable[None]],
        leave: Callable[[int], Awaitable[None]],
        report: Callable[[Event], None],
    ) -> None:
        self._peer = peer
        self._tasks = tasks
        self._join_group = join
        self._leave_group = leave
        self._report = report
        self._lanes: dict[int, Lane] = {}

    def perform(self, effect: JoinGroup | LeaveGroup) -> None:
        match effect:
            case JoinGroup(proposal):
                self._lanes[proposal.view] = Lane(self._tasks)
                self._lanes[proposal.view].add(partial(self._join, proposal))
            case LeaveGroup(view):
                lane = self._lanes.pop(view)
                lane.interrupt()
                lane.add(partial(self._leave, view))
                lane.close()

    async def leave_all(self) -> None:
        """Leave every group, for `LEAVE_TIMEOUT` at most, also when cancelled."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as leaving:
                for view in self._lanes:
                    leaving.start_soon(self._leave, view)

    async def _join(self, proposal: ViewProposed) -> None:
        try:
            with anyio.fail_after(proposal.timeout + JOIN_GRACE):
                await self._join_group(proposal)
        except RendezvousFailed as error:
            missing = tuple(sorted({proposal.members[rank].node for rank in error.missing}))
            self._report(ViewFailed(proposal.view, self._peer, missing, str(error)))
        except Exception as error:
            logger.exception("joining view %d failed", proposal.view)
            detail = f"joining failed: {type(error).__name__}: {error}"
            self._report(ViewFailed(proposal.view, self._peer, (), detail))
        else:
            self._report(ViewJoined(proposal.view, self._peer))

    async def _leave(self, view: int) -> None:
        try:
            with anyio.fail_after(LEAVE_TIMEOUT):
                await self._leave_group(view)
        except Exception:
            logger.exception("leaving view %d failed", view)
