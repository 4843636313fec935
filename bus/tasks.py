"""Background tasks that end with the block that opened them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled when the block is left, and raises a lone error as itself.

    A user who catches `UpdateFailed` around a publisher's block must not need to know that tasks run inside.
    """
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield tasks
            finally:
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        error = group.exceptions[0]
        raise error from error.__cause__


class Lane:
    """Does one thing after another, in the order given; what is being done can be cut short."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._send, self._steps = anyio.create_memory_object_stream[Callable[[], Awaitable[None]]](float("inf"))
        self._scope: anyio.CancelScope | None = None
        tasks.start_soon(self._work)

    def add(self, step: Callable[[], Awaitable[None]]) -> None:
        """Have a step done after those before it; one that comes when the lane's tasks have ended is nobody's."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._send.send_nowait(step)

    def interrupt(self) -> None:
        """Cancel the step under way; those that wait go on."""
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        """Take no more steps; the lane ends after those it has."""
        self._send.close()

    async def _work(self) -> None:
        with self._send, self._steps:
            async for step in self._steps:
                with anyio.CancelScope() as self._scope:
                    await step()
                self._scope = None
