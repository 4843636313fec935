"""A whole fleet in one process: controller, trainer and nodes over real sockets and real Gloo groups.

Only the engine is light. What is said here of updates holds for vLLM too; `test_end_to_end.py` shows that.
Everything runs on asyncio and on trio (B016).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
import torch
from anyio.abc import TaskGroup

from bus.controller import Controller
from bus.errors import AddressInUse, ControllerUnreachable, JoinFailed, LoadFailed, UpdateFailed
from bus.events import Outcome, Phase, Reason
from bus.follower import follow
from bus.journal import SqliteJournal
from bus.protocol import Timeouts
from tests.fakes import LightEngine, capabilities, layout
from trainer_node import AdapterPublisher, ExportedAdapter, Update

pytestmark = pytest.mark.anyio


QUICK = Timeouts(heartbeat=0.1, lease=1.0, view=3.0, ready=2.0, transfer=2.0, load=2.0, activate=2.0, publish=10.0)


def adapter(value: float, rank: int = 4) -> ExportedAdapter:
    shape = layout(rank)
    return ExportedAdapter(shape, {spec.name: torch.full(spec.shape, value) for spec in shape.tensors})


@asynccontextmanager
async def fleet(*engines: LightEngine, **settings: object) -> AsyncIterator[tuple[AdapterPublisher, TaskGroup]]:
    publisher = AdapterPublisher("policy", bind="tcp://127.0.0.1:0", timeouts=QUICK, **settings)
    async with publisher, anyio.create_task_group() as tasks:
        for index, engine in enumerate(engines):
            await join(tasks, publisher, engine, f"node-{index}")
        await publisher.wait_for_nodes(len(engines), timeout=10)
        yield publisher, tasks
        tasks.cancel_scope.cancel()


async def join(tasks: TaskGroup, publisher: AdapterPublisher, engine: LightEngine, node: str) -> anyio.CancelScope:
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await follow(engine, address=publisher.address, node=node, timeouts=QUICK)

    tasks.start_soon(run)
    return scope


async def test_publish_returns_when_every_node_serves_the_version() -> None:
    engines = [LightEngine(), LightEngine(), LightEngine()]
    async with fleet(*engines) as (publisher, _):
        for version in (1, 2, 3):
            update = await publisher.publish(adapter(float(version)))
            assert update.version == version
            assert [engine.active["policy"] for engine in engines] == [version] * 3
            assert {engine.versions["policy", version] for engine in engines} == {update.digest.encode()}
            assert [node.outcome for node in update.nodes] == [Outcome.ACTIVATED] * 3


async def test_a_refusing_node_fails_the_update_before_any_byte_moves_and_all_keep_the_old_version() -> None:
    """B002: names the node and both numbers."""
    engines = [LightEngine(), LightEngine(capabilities(max_rank=4))]
    async with fleet(*engines) as (publisher, _):
        await publisher.publish(adapter(1.0))
        with pytest.raises(UpdateFailed, match=r"rank 8.*at most 4") as caught:
            await publisher.publish(adapter(2.0, rank=8))
        assert (caught.value.node, caught.value.phase, caught.value.reason) == (
            "node-1",
            Phase.READY,
            Reason.RANK_TOO_HIGH,
        )
        assert [engine.active["policy"] for engine in engines] == [1, 1]
        assert (await publisher.publish(adapter(3.0))).version == 2


async def test_a_failing_load_burns_the_number_and_leaves_the_old_version_everywhere() -> None:
    """B009, B088: the loader's own words come back, and the next version needs no restart."""
    engines = [LightEngine(), LightEngine()]

    async def fail() -> None:
        raise LoadFailed(Reason.ENGINE_FAILED, "out of slots")

    async with fleet(*engines) as (publisher, _):
        await publisher.publish(adapter(1.0))
        engines[1].before["load"] = fail
        with pytest.raises(UpdateFailed, match="out of slots") as caught:
            await publisher.publish(adapter(2.0))
        assert (caught.value.version, caught.value.node, caught.value.phase) == (2, "node-1", Phase.LOAD)
        assert [engine.active["policy"] for engine in engines] == [1, 1]
        del engines[1].before["load"]
        assert (await publisher.publish(adapter(3.0))).version == 3
        assert [engine.active["policy"] for engine in engines] == [3, 3]


async def test_a_node_lost_in_the_transfer_is_named_and_the_others_get_the_version() -> None:
    """B017: the group is built anew from the living, inside the lease plus the transfer's time."""
    engines = [LightEngine(), LightEngine(), LightEngine()]
    publisher = AdapterPublisher("policy", bind="tcp://127.0.0.1:0", timeouts=QUICK)
    async with publisher, anyio.create_task_group() as tasks:
        for index, engine in enumerate(engines[:2]):
            await join(tasks, publisher, engine, f"node-{index}")
        doomed = await join(tasks, publisher, engines[2], "node-2")
        await publisher.wait_for_nodes(3, timeout=10)
        await publisher.publish(adapter(1.0))

        async def die() -> None:
            doomed.cancel()
            await anyio.sleep_forever()

        engines[2].before["receive"] = die
        update = await publisher.publish(adapter(2.0))
        outcomes = {node.node: (node.outcome, node.phase) for node in update.nodes}
        assert outcomes["node-2"][0] is Outcome.LOST
        assert outcomes["node-0"][0] is outcomes["node-1"][0] is Outcome.ACTIVATED
        assert [engine.active["policy"] for engine in engines] == [2, 2, 1]
        tasks.cancel_scope.cancel()


async def test_a_late_joiner_gets_the_head_while_the_others_serve_on() -> None:
    """B001: what was published before a node came is not lost to it."""
    early, late = LightEngine(), LightEngine()
    async with fleet(early) as (publisher, tasks):
        update = await publisher.publish(adapter(1.0))
        await join(tasks, publisher, late, "late")
        with anyio.fail_after(10):
            await late.activated.wait()
        assert late.versions["policy", 1] == update.digest.encode()
        assert early.history == [("policy", 1)]
        assert (await publisher.publish(adapter(2.0))).version == 2
        assert (early.active, late.active) == ({"policy": 2}, {"policy": 2})


async def test_a_node_of_two_workers_brings_two_ranks_and_confirms_when_both_have_loaded() -> None:
    engine = LightEngine(capabilities(workers=2))
    async with fleet(engine, LightEngine()) as (publisher, _):
        update = await publisher.publish(adapter(1.0))
        assert engine.versions["policy", 1] == update.digest.encode()


async def test_what_was_published_stands_in_the_journal(tmp_path: object) -> None:
    path = f"{tmp_path}/journal.db"
    async with fleet(LightEngine(), journal=path) as (publisher, _):
        await publisher.publish(adapter(1.0))
    with SqliteJournal(path) as journal:
        kinds = [type(entry.event).__name__ for entry in journal.entries()]
    story = ["UpdateAnnounced", "NodeReady", "TransferStarted", "AdapterReceived", "AdapterLoaded", "VersionCommitted"]
    assert [kind for kind in kinds if kind in story] == story


async def test_numbers_go_on_after_a_restart_on_the_same_journal(tmp_path: object) -> None:
    """B086: a number is never used twice."""
    path = f"{tmp_path}/journal.db"
    for expected in (1, 2):
        async with fleet(LightEngine(), journal=path) as (publisher, _):
            assert (await publisher.publish(adapter(float(expected)))).version == expected


async def test_a_publish_without_nodes_ends_at_its_deadline_and_says_so() -> None:
    async with fleet() as (publisher, _):
        with pytest.raises(UpdateFailed, match="no rollout node"):
            await publisher.publish(adapter(1.0), timeout=0.5)


async def test_publishes_wait_their_turn_and_each_sends_what_it_saw() -> None:
    """A snapshot is taken when publish is called, not when its turn comes."""
    engine = LightEngine()
    async with fleet(engine) as (publisher, _):
        updates: dict[float, Update] = {}

        async def publish(value: float) -> None:
            updates[value] = await publisher.publish(adapter(value))

        async with anyio.create_task_group() as publishing:
            for value in (1.0, 2.0, 3.0, 4.0):
                publishing.start_soon(publish, value)
        assert sorted(update.version for update in updates.values()) == [1, 2, 3, 4]
        for update in updates.values():
            assert engine.versions["policy", update.version] == update.digest.encode()
        assert len({update.digest for update in updates.values()}) == 4


async def test_a_superseded_publish_says_so_and_the_newest_goes_next() -> None:
    engine = LightEngine()
    hold = anyio.Event()
    engine.before["load"] = hold.wait
    async with fleet(engine, queue="supersede") as (publisher, _):
        ends: dict[float, str] = {}

        async def publish(value: float) -> None:
            try:
                ends[value] = f"version {(await publisher.publish(adapter(value))).version}"
            except UpdateFailed as error:
                ends[value] = error.reason

        async with anyio.create_task_group() as publishing:
            for value in (1.0, 2.0, 3.0):
                publishing.start_soon(publish, value)
                await anyio.sleep(0.3)
            hold.set()
        assert ends == {1.0: "version 1", 2.0: "superseded", 3.0: "version 2"}


async def test_under_quorum_a_refusing_node_is_left_out_and_named() -> None:
    engines = [LightEngine(), LightEngine(), LightEngine(capabilities(max_rank=2))]
    async with fleet(*engines, policy="quorum") as (publisher, _):
        update = await publisher.publish(adapter(1.0))
        assert {node.node: node.outcome for node in update.nodes} == {
            "node-0": Outcome.ACTIVATED,
            "node-1": Outcome.ACTIVATED,
            "node-2": Outcome.REFUSED,
        }
        assert [engine.active.get("policy") for engine in engines] == [1, 1, None]
        assert (await publisher.publish(adapter(2.0))).version == 2


async def test_two_controllers_live_on_one_host_and_a_held_port_is_named() -> None:
    """B010: ports are the system's choice, and an explicit one that is taken is said at once."""
    async with fleet(LightEngine()) as (first, _), fleet(LightEngine()) as (second, _):
        assert (await first.publish(adapter(1.0))).version == 1
        assert (await second.publish(adapter(1.0))).version == 1
        with pytest.raises(AddressInUse, match=first.address):
            async with AdapterPublisher("policy", bind=first.address):
                raise AssertionError("opened")


async def test_a_second_live_trainer_of_an_adapter_is_told_who_has_it() -> None:
    async with fleet() as (publisher, _):
        with pytest.raises(JoinFailed, match="trainer is publishing policy"):
            async with AdapterPublisher("policy", address=publisher.address, node="rival", join_timeout=0.5):
                raise AssertionError("opened")


async def test_a_controller_that_is_not_there_is_named_in_time() -> None:
    with pytest.raises(ControllerUnreachable, match=r"no controller answered at tcp://127.0.0.1:9 within 0.5 s"):
        async with AdapterPublisher("policy", address="tcp://127.0.0.1:9", join_timeout=0.5):
            raise AssertionError("opened")


async def test_nodes_follow_the_next_trainer_without_a_restart() -> None:
    """B091: the group of a trainer that is gone is never used again; a standalone controller keeps the numbers."""
    engine = LightEngine()
    async with Controller.open("tcp://127.0.0.1:0", timeouts=QUICK) as controller, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(follow, engine, address=controller.address, node="node-0", timeouts=QUICK))
        for version in (1, 2):
            async with AdapterPublisher("policy", address=controller.address, timeouts=QUICK) as publisher:
                await publisher.wait_for_nodes(1, timeout=10)
                update = await publisher.publish(adapter(float(version)))
                assert update.version == engine.active["policy"] == version
        tasks.cancel_scope.cancel()
