"""The agent's line to its workers: one command to all of them, one answer from each, or an error that says whose."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import anyio

from bus.errors import BusError, CodecError, LoadFailed, Refused, RendezvousFailed, TransferFailed
from bus.events import Envelope
from bus.transport import Router
from rollout_node.commands import (
    ANSWER_CODEC,
    COMMAND_CODEC,
    Answer,
    Attached,
    Command,
    Failed,
    Failure,
    JoinGroup,
    LeaveGroup,
)


@dataclass(slots=True)
class _Question:
    """A command on its way, until every worker has answered or one has failed."""

    awaited: int
    answers: dict[int, Answer] = field(default_factory=dict)
    settled: anyio.Event = field(default_factory=anyio.Event)

    def take(self, answer: Answer) -> None:
        self.answers[answer.worker] = answer
        if isinstance(answer, Failed) or len(self.answers) == self.awaited:
            self.settled.set()


class WorkerLine:
    """A private socket that every worker of this node connects to; made by `open`."""

    def __init__(self, router: Router, workers: int) -> None:
        self._router = router
        self._workers = workers
        self._attached = _Question(workers)
        self._questions = {0: self._attached}
        self._asked = 0

    @property
    def address(self) -> str:
        """Where workers connect to."""
        return self._router.address

    @classmethod
    @asynccontextmanager
    async def open(cls, workers: int) -> AsyncIterator[Self]:
        """A line for so many workers; leaving the block, cancelled or not, takes at most the transport's linger."""
        # The directory lets only this user in, so nobody else can command the workers.
        with tempfile.TemporaryDirectory(prefix="adapterbus-") as directory:
            async with (
                Router.open(f"ipc://{os.path.join(directory, 'workers')}") as router,
                anyio.create_task_group() as group,
            ):
                line = cls(router, workers)
                group.start_soon(line._hear)
                yield line
                group.cancel_scope.cancel()

    async def wait_attached(self) -> None:
        """Wait until every worker has connected."""
        await self._attached.settled.wait()

    async def ask(self, command: Command) -> list[Answer]:
        """Have every worker do something, and wait for all of them; the answers in the order of the workers.

        Raises what the first worker that failed says: `Refused`, `RendezvousFailed`, `TransferFailed` or
        `LoadFailed`; and `PeerGone` for a worker that is not connected. Cancelling stops the waiting, not the
        workers: their answers are dropped.
        """
        self._asked += 1
        number, question = self._asked, _Question(self._workers)
        self._questions[number] = question
        try:
            frame = COMMAND_CODEC.encode(Envelope("", number, command))
            for worker in range(self._workers):
                self._router.send_nowait(f"worker-{worker}".encode(), frame)
            await question.settled.wait()
        finally:
            del self._questions[number]
        for answer in question.answers.values():
            if isinstance(answer, Failed):
                raise self._error(command, answer)
        return [answer for _, answer in sorted(question.answers.items())]

    def whose(self, worker: int) -> str:
        """The worker's name before an error's text; nothing if there is only one."""
        return f"worker {worker}: " if self._workers > 1 else ""

    async def _hear(self) -> None:
        while True:
            _, frame = await self._router.receive()
            try:
                envelope = ANSWER_CODEC.decode(frame)
            except CodecError:
                continue
            question = self._questions.get(envelope.sequence)
            if question is not None and isinstance(envelope.event, Attached) == (question is self._attached):
                question.take(envelope.event)

    def _error(self, command: Command, failed: Failed) -> BusError:
        view = command.view if isinstance(command, JoinGroup | LeaveGroup) else command.attempt.view
        detail = f"{self.whose(failed.worker)}{failed.detail}"
        match failed.family:
            case Failure.RENDEZVOUS:
                timeout = command.timeout if isinstance(command, JoinGroup) else 0.0
                return RendezvousFailed(view, failed.missing, timeout, detail)
            case Failure.TRANSFER:
                return TransferFailed(view, detail)
            case Failure.REFUSED:
                return Refused(failed.reason, detail)
            case Failure.LOAD:
                return LoadFailed(failed.reason, detail)
