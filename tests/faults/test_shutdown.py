"""Leaving takes less than 5 seconds in any state, and leaves no thread, descriptor or task behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from anyio.abc import TaskGroup

from bus.client import Connection, new_peer
from bus.controller import Controller
from bus.errors import UpdateFailed
from bus.events import Role
from bus.follower import follow
from bus.protocol import Timeouts
from tests.fakes import LightEngine, layout
from trainer_node import AdapterPublisher, ExportedAdapter

pytestmark = pytest.mark.slow

BOUND = 5.0
"""Seconds that anything may take to leave, and then again for what it left to itself (a broadcast under way) to end."""

PATIENT = Timeouts(heartbeat=0.2, lease=10.0, view=30.0, ready=30.0, transfer=4.0, load=30.0, activate=30.0)
"""Waits longer than the bound, but for a broadcast, which nothing can stop: none ends here because its time is up."""

BIG = layout(rank=16, hidden=131_072)
"""32 MiB: more than the sockets hold, so that a broadcast waits for a receiver that does not come."""

NOBODY = "tcp://127.0.0.1:1"


def census() -> Counter[str]:
    """What this process holds: Python's threads by name, the kernel's count of all, descriptors by kind."""
    found = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    found["kernel threads"] = len(os.listdir("/proc/self/task"))
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is gone
            found[os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]] += 1
    return found


def check_leaves_nothing(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run it on an event loop of its own; afterwards this process holds what it held before."""

    async def run() -> None:
        await scenario()
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()

    before = census()
    asyncio.run(run())
    deadline = time.monotonic() + BOUND
    while (left := census() - before) and time.monotonic() < deadline:
        threading.Event().wait(0.02)  # nothing tells of a thread's last instruction
    assert not left


def adapter() -> ExportedAdapter:
    return ExportedAdapter(BIG, {spec.name: torch.ones(spec.shape) for spec in BIG.tensors})


class Stage:
    """A controller, a trainer and two nodes in one event loop, each of which can be made to leave by itself."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.engines = {"node-1": LightEngine(), "node-2": LightEngine()}
        self.address = ""
        self.publisher: AdapterPublisher
        self._tasks = tasks
        self._parts: dict[str, tuple[anyio.CancelScope, anyio.Event]] = {}

    async def build(self) -> None:
        """All but the second node; the first serves a version."""
        for name, part in (("controller", self._controller), ("trainer", self._trainer)):
            ready = anyio.Event()
            self._start(name, partial(part, ready))
            await ready.wait()
        self.join("node-1")
        await self.publisher.publish(adapter())

    def join(self, name: str) -> None:
        self._start(name, partial(follow, self.engines[name], address=self.address, node=name, timeouts=PATIENT))

    async def leave(self, name: str) -> None:
        """Cancel a part and wait for its end, which must come in time."""
        scope, left = self._parts[name]
        started = anyio.current_time()
        scope.cancel()
        await left.wait()
        seconds = anyio.current_time() - started
        assert seconds < BOUND, f"{name} took {seconds:.1f} s to leave"

    def publish(self) -> None:
        async def publish() -> None:
            with suppress(UpdateFailed):
                await self.publisher.publish(adapter())

        self._start("publish", publish)

    def _start(self, name: str, main: Callable[[], Awaitable[None]]) -> None:
        scope, left = self._parts[name] = anyio.CancelScope(), anyio.Event()

        async def run() -> None:
            try:
                with scope:
                    await main()
            finally:
                left.set()

        self._tasks.start_soon(run)

    async def _controller(self, ready: anyio.Event) -> None:
        async with Controller.open("tcp://127.0.0.1:0", timeouts=PATIENT) as controller:
            self.address = controller.address
            ready.set()
            await anyio.sleep_forever()

    async def _trainer(self, ready: anyio.Event) -> None:
        async with AdapterPublisher("policy", address=self.address, timeouts=PATIENT) as self.publisher:
            ready.set()
            await anyio.sleep_forever()


async def idle(stage: Stage) -> None:
    """Everybody serves a version, and nothing goes on."""
    await stage.build()
    stage.join("node-2")
    await stage.engines["node-2"].activated.wait()


async def mid_view(stage: Stage) -> None:
    """One node's engine never enters the group; the others wait for it, and a publish for them."""
    await stage.build()
    waiting = [hang(stage.engines["node-2"], "join_view"), pass_by(stage.engines["node-1"], "join_view")]
    stage.join("node-2")
    for reached in waiting:
        await reached.wait()
    stage.publish()


async def mid_transfer(stage: Stage) -> None:
    """One node's engine never takes the bytes; the trainer and the other node are inside the broadcast."""
    await idle(stage)
    waiting = [hang(stage.engines["node-2"], "receive"), pass_by(stage.engines["node-1"], "receive")]
    stage.publish()
    for reached in waiting:
        await reached.wait()


def hang(engine: LightEngine, step: str) -> anyio.Event:
    reached = anyio.Event()

    async def never() -> None:
        reached.set()
        await anyio.sleep_forever()

    engine.before[step] = never
    return reached


def pass_by(engine: LightEngine, step: str) -> anyio.Event:
    reached = anyio.Event()

    async def at_once() -> None:
        reached.set()

    engine.before[step] = at_once
    return reached


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What torch and anyio start once and keep is not what a block leaves behind."""

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            await idle(Stage(tasks))
            tasks.cancel_scope.cancel()

    asyncio.run(run())


PARTS = ["controller", "trainer", "node-1", "node-2"]


@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("state", [idle, mid_view, mid_transfer], ids=lambda state: state.__name__)
def test_each_leaves_in_time_in_any_state_and_then_the_others_without_it(
    state: Callable[[Stage], Awaitable[None]], first: str
) -> None:
    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            stage = Stage(tasks)
            await state(stage)
            for name in [first, *(part for part in PARTS if part != first)]:
                await stage.leave(name)
            tasks.cancel_scope.cancel()

    check_leaves_nothing(scenario)


async def connect() -> None:
    async with Connection.open(NOBODY, new_peer("observer"), Role.OBSERVER):
        raise AssertionError("nobody is there")


async def follow_nobody() -> None:
    await follow(LightEngine(), address=NOBODY, timeouts=PATIENT)


async def publish_to_nobody() -> None:
    async with AdapterPublisher("policy", address=NOBODY, timeouts=PATIENT, join_timeout=60.0):
        raise AssertionError("nobody is there")


@pytest.mark.parametrize("wait", [connect, follow_nobody, publish_to_nobody], ids=lambda wait: wait.__name__)
def test_what_waits_for_a_controller_that_is_not_there_leaves_in_time(wait: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        with anyio.move_on_after(0.3) as waiting:
            await wait()
        assert waiting.cancelled_caught
        assert anyio.current_time() - waiting.deadline < BOUND

    check_leaves_nothing(scenario)


def test_a_blocking_publisher_leaves_in_time_though_a_publish_waits_on_another_thread(tmp_path: Path) -> None:
    """Ctrl-C in a training loop must not wait for a fleet that does not come."""

    async def scenario() -> None:
        publisher = AdapterPublisher.blocking("policy", bind="tcp://127.0.0.1:0", journal=tmp_path / "journal.db")
        with publisher:
            publishing = threading.Thread(target=lambda: _ignoring_the_end(publisher.publish))
            publishing.start()
            while not publisher.refresh_nodes() and not publisher._session._pending:
                pass
            started = time.monotonic()
        assert time.monotonic() - started < BOUND
        publishing.join(BOUND)
        assert not publishing.is_alive()

    check_leaves_nothing(scenario)


def _ignoring_the_end(publish: Callable[[ExportedAdapter], object]) -> None:
    with suppress(UpdateFailed, asyncio.CancelledError):
        publish(adapter())
