"""The node's own decisions, without vLLM: versions and slots, the line to the workers, the server's command line."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import EngineUnsupported, InvalidInput, LoadFailed, Refused, RendezvousFailed, TransferFailed
from bus.events import (
    Attempt,
    Envelope,
    Member,
    NodeCapabilities,
    Reason,
    TransferStarted,
    UpdateAnnounced,
    ViewProposed,
)
from bus.manifest import AdapterLayout, AdapterManifest, BaseModel, TensorSpec
from bus.transport import Dealer
from rollout_node import WORKER_EXTENSION
from rollout_node.commands import (
    ANSWER_CODEC,
    COMMAND_CODEC,
    Answer,
    Attached,
    BytesHeld,
    Command,
    Discard,
    Done,
    Failed,
    Failure,
    JoinGroup,
    LeaveGroup,
    Prepare,
    Receive,
)
from rollout_node.engine import VllmEngine
from rollout_node.serve import server_command
from rollout_node.versions import Stage, VersionTable
from rollout_node.worker_line import WorkerLine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ------------------------------------------------------------------------------------------- the table


def attempt(version: int, adapter: str = "policy") -> Attempt:
    return Attempt(adapter, version, 1, 1)


def serve_version(table: VersionTable, version: int, adapter: str = "policy") -> None:
    table.reserve(attempt(version, adapter), version).stage = Stage.SERVED


def test_the_newest_served_version_is_the_head_whatever_the_order() -> None:
    table = VersionTable(slots=4)
    for version in (7, 9, 8):
        serve_version(table, version)
    table.reserve(attempt(10), 10)
    head = table.head("policy")
    assert head is not None
    assert head.name == "policy@9"
    assert table.head("other") is None


def test_retention_frees_one_slot_and_never_gives_up_a_head() -> None:
    table = VersionTable(slots=3)
    serve_version(table, 1, "critic")
    serve_version(table, 1)
    assert table.surplus() == []
    serve_version(table, 2)
    assert [old.name for old in table.surplus()] == ["policy@1"]
    table.surplus()[0].stage = Stage.DRAINING
    assert table.surplus() == []
    assert table.oldest_replaceable() is None


def test_a_version_that_came_twice_gives_one_slot_back() -> None:
    """Its newer attempt is the head; the other is as old as any, and its name goes on being served."""
    table = VersionTable(slots=3)
    for number in (1, 2):
        table.reserve(Attempt("policy", 7, number, 1), number).stage = Stage.SERVED
    oldest, head = table.oldest_replaceable(), table.head("policy")
    assert oldest is not None
    assert head is not None
    assert (oldest.lora_id, head.lora_id) == (1, 2)
    oldest.stage = Stage.DRAINING
    assert table.is_served("policy@7")


def test_one_version_on_its_way_out_is_enough() -> None:
    table = VersionTable(slots=3)
    for version in (1, 2, 3):
        serve_version(table, version)
    (first,) = table.surplus()
    first.stage = Stage.DRAINING
    assert table.surplus() == []


def test_versions_beyond_the_retained_go_even_while_slots_are_free() -> None:
    table = VersionTable(slots=8, retain=2)
    for version in range(1, 5):
        serve_version(table, version)
    assert [old.name for old in table.surplus()] == ["policy@1", "policy@2"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=40), st.integers(2, 5))
def test_slots_are_never_oversubscribed_and_heads_stay(publishes: list[tuple[str, bool]], slots: int) -> None:
    table = VersionTable(slots)
    for version, (adapter, drains_at_once) in enumerate(publishes, 1):
        if table.free < 1 and (oldest := table.oldest_replaceable()):
            table.remove(oldest)
        if table.free < 1:
            continue
        serve_version(table, version, adapter)
        for old in table.surplus():
            old.stage = Stage.UNUSED if drains_at_once else Stage.DRAINING
        for old in table.unused():
            table.remove(old)
        assert table.free >= 0
        head = table.head(adapter)
        assert head is not None
        assert head.attempt.version == version


# -------------------------------------------------------------------------------- the line to workers


ATTEMPT = attempt(3)
SPECS = tuple(TensorSpec(f"base_model.model.m.q_proj.lora_{part}.weight", "bfloat16", (4, 4)) for part in "AB")
LAYOUT = AdapterLayout(BaseModel("tiny", "config:1"), '{"r": 4}', SPECS)
MANIFEST = AdapterManifest.of(LAYOUT, "blake3:0")

Behaviour = Callable[[int, Command], Answer | None]


def obedient(worker: int, command: Command) -> Answer | None:
    return BytesHeld(worker, "blake3:0", 0.1) if isinstance(command, Receive) else Done(worker)


async def pretend_worker(address: str, worker: int, behaviour: Behaviour, heard: list[Command]) -> None:
    async with Dealer.open(address, f"worker-{worker}".encode()) as dealer:
        dealer.send_nowait(ANSWER_CODEC.encode(Envelope("", 0, Attached(worker))))
        while True:
            envelope = COMMAND_CODEC.decode(await dealer.receive())
            heard.append(envelope.event)
            answer = behaviour(worker, envelope.event)
            if answer is not None:
                dealer.send_nowait(ANSWER_CODEC.encode(Envelope("", envelope.sequence, answer)))


@asynccontextmanager
async def line_to(workers: int, behaviour: Behaviour = obedient) -> AsyncIterator[tuple[WorkerLine, list[Command]]]:
    heard: list[Command] = []
    async with WorkerLine.open(workers) as line, anyio.create_task_group() as group:
        for worker in range(workers):
            group.start_soon(pretend_worker, line.address, worker, behaviour, heard)
        with anyio.fail_after(5):
            await line.wait_attached()
        yield line, heard
        group.cancel_scope.cancel()


async def test_a_command_reaches_every_worker_and_waits_for_all() -> None:
    async with line_to(3) as (line, heard):
        assert await line.ask(LeaveGroup(7)) == [Done(0), Done(1), Done(2)]
        assert heard == [LeaveGroup(7)] * 3


@pytest.mark.parametrize(
    ("family", "error"),
    [
        (Failure.REFUSED, Refused),
        (Failure.LOAD, LoadFailed),
        (Failure.TRANSFER, TransferFailed),
        (Failure.RENDEZVOUS, RendezvousFailed),
    ],
)
async def test_one_failing_worker_fails_the_command_and_is_named(family: Failure, error: type[Exception]) -> None:
    """B120, B123: all workers of a node do it, or the node has not; no answer of the others is waited for."""

    def second_fails(worker: int, command: Command) -> Answer | None:
        return Failed(1, family, "unknown_modules", "no such module", (2,)) if worker else None

    async with line_to(2, second_fails) as (line, _):
        with pytest.raises(error, match="worker 1: no such module"), anyio.fail_after(5):
            await line.ask(JoinGroup(4, (1, 2), 3, "127.0.0.1:1", 5.0))


async def test_an_answer_to_a_cancelled_command_is_dropped() -> None:
    late: list[int] = []

    def slow(worker: int, command: Command) -> Answer | None:
        late.append(worker)
        return None if len(late) == 1 else Done(worker)

    async with line_to(1, slow) as (line, _):
        with anyio.move_on_after(0.05):
            await line.ask(LeaveGroup(1))
        assert await line.ask(LeaveGroup(2)) == [Done(0)]


def test_only_this_user_can_reach_the_workers() -> None:
    async def mode() -> int:
        async with WorkerLine.open(1) as line:
            return Path(line.address.removeprefix("ipc://")).parent.stat().st_mode & 0o777

    assert anyio.run(mode) == 0o700


# ------------------------------------------------------------------------------------------ the engine


class Request:
    """What vLLM's LoRA request is to the engine: something that requests hold."""

    def __init__(self, name: str) -> None:
        self.name = name


class PretendServer:
    """`ServedModels` without vLLM behind it; `slots_filled` are the numbers that its workers hold."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.workers = 1
        self.names: dict[str, Any] = {}
        self.slots_filled: set[int] = set()
        self.broken = ""
        self.stuck: set[int] = set()
        self.collected = 0
        self._number = 0

    def is_taken(self, adapter: str) -> bool:
        return adapter == "base"

    def next_lora_id(self) -> int:
        self._number += 1
        return self._number

    def watched_request(self, name: str, lora_id: int, path: str, on_unused: Callable[[], None]) -> Request:
        request = Request(name)
        weakref.finalize(request, on_unused)
        return request

    def serve(self, name: str, request: Request) -> None:
        self.names[name] = request

    def stop_serving(self, name: str) -> None:
        self.names.pop(name, None)

    def release_abandoned(self) -> None:
        self.collected += 1
        gc.collect()

    async def call_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        await anyio.lowlevel.checkpoint()
        if method == "adapterbus_remove":
            if args[0] in self.stuck:
                await anyio.sleep_forever()
            self.slots_filled.discard(args[0])
            return [{"removed": True}]
        if self.broken:
            return [{"reason": "engine_failed", "error": self.broken}]
        self.slots_filled.add(self._number)
        assert len(self.slots_filled) <= self.slots, "a slot was filled that was not free"
        return [{"worker": 0, "digest": "blake3:0", "matched": 2, "total": 2, "seconds": 0.0}]


CAPABILITIES = NodeCapabilities(
    base_model=LAYOUT.base_model, max_rank=16, slots=4, modules=("q_proj",), dtype="bfloat16", workers=1,
    device="cpu", engine="vllm", engine_version="0",
)  # fmt: skip


@asynccontextmanager
async def engine_with(
    slots: int = 4, behaviour: Behaviour = obedient, retain: int | None = None
) -> AsyncIterator[tuple[VllmEngine, PretendServer]]:
    server = PretendServer(slots)
    async with line_to(1, behaviour) as (line, _):
        engine = VllmEngine(server, line, CAPABILITIES, retain)  # type: ignore[arg-type]
        await engine.join_view(ViewProposed(1, "trainer", (Member("trainer", 0), Member("n", 0)), "h:1", 5.0), "n")
        yield engine, server


def announced(
    version: int, adapter: str = "policy", timeout: float = 10.0, manifest: Any = MANIFEST
) -> UpdateAnnounced:
    return UpdateAnnounced(attempt(version, adapter), "r", "trainer", ("n",), manifest, timeout)


async def publish(engine: VllmEngine, version: int, adapter: str = "policy") -> None:
    await engine.prepare(announced(version, adapter), LAYOUT)
    assert (await engine.receive(TransferStarted(attempt(version, adapter), ("n",), 5.0))).digest == "blake3:0"
    loaded = await engine.load(attempt(version, adapter))
    assert (loaded.matched, loaded.total) == (2, 2)
    await engine.activate(attempt(version, adapter))


async def test_the_alias_moves_with_each_version_and_old_ones_stay_addressable() -> None:
    async with engine_with(slots=4) as (engine, server):
        for version in range(1, 10):
            await publish(engine, version)
            assert server.names["policy"] is server.names[f"policy@{version}"]
        assert set(server.names) == {"policy", "policy@9", "policy@8", "policy@7"}


async def test_the_alias_never_goes_back() -> None:
    """I2: a version that arrives late is addressable by its own name only."""
    async with engine_with() as (engine, server):
        await publish(engine, 5)
        await publish(engine, 4)
        assert server.names["policy"].name == "policy@5"
        assert "policy@4" in server.names


async def test_a_version_lives_until_the_last_request_that_took_it_ends() -> None:
    """A request holds what it was admitted with, also before the engine knows of it."""
    async with engine_with(slots=2) as (engine, server):
        await publish(engine, 1)
        admitted = server.names["policy"]
        await publish(engine, 2)
        assert "policy@1" not in server.names
        assert server.slots_filled == {1, 2}
        with anyio.move_on_after(0.05):
            await engine.wait_retired()
        assert server.slots_filled == {1, 2}
        del admitted
        with anyio.fail_after(5):
            assert await engine.wait_retired() == ("policy", 1)
        assert server.slots_filled == {2}


async def test_a_request_left_in_a_reference_cycle_does_not_keep_its_version() -> None:
    async with engine_with(slots=2) as (engine, server):
        await publish(engine, 1)
        admitted = [server.names["policy"]]
        admitted.append(admitted)
        await publish(engine, 2)
        del admitted
        await engine.prepare(announced(3), LAYOUT)
        assert server.collected


async def test_without_a_slot_the_update_is_refused_with_the_numbers_before_its_deadline() -> None:
    async with engine_with(slots=2) as (engine, server):
        await publish(engine, 1)
        admitted = server.names["policy"]
        await publish(engine, 2)
        with anyio.fail_after(0.5), pytest.raises(Refused, match="all 2 LoRA slots are taken, 1 by") as refused:
            await engine.prepare(announced(3, timeout=0.5), LAYOUT)
        assert refused.value.reason == Reason.NO_FREE_SLOT
        del admitted
        await publish(engine, 3)


async def test_heads_of_other_adapters_are_refused_at_once_not_evicted() -> None:
    async with engine_with(slots=2) as (engine, server):
        await publish(engine, 1, "a")
        await publish(engine, 1, "b")
        with anyio.fail_after(2), pytest.raises(Refused, match="all 2 LoRA slots are taken, 0 by"):
            await engine.prepare(announced(1, "c", timeout=60), LAYOUT)
        assert set(server.names) == {"a", "a@1", "b", "b@1"}


async def test_an_idle_version_makes_room_when_the_oldest_is_still_in_use() -> None:
    async with engine_with(slots=3) as (engine, server):
        await publish(engine, 1)
        admitted = server.names["policy"]
        for version in range(2, 8):
            await publish(engine, version)
        assert admitted.name == "policy@1"
        assert 1 in server.slots_filled


async def test_a_discarded_attempt_leaves_no_slot_filled_and_no_name() -> None:
    async with engine_with(slots=2) as (engine, server):
        await publish(engine, 1)
        for version in range(2, 6):
            await engine.prepare(announced(version), LAYOUT)
            await engine.receive(TransferStarted(attempt(version), ("n",), 5.0))
            await engine.load(attempt(version))
            await engine.discard(attempt(version))
            await engine.discard(attempt(version))
            assert server.slots_filled == {1}
        assert set(server.names) == {"policy", "policy@1"}


async def test_an_engine_that_never_lets_an_old_version_go_loses_a_slot_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B108: new versions still load."""
    monkeypatch.setattr("rollout_node.engine._REMOVE_SECONDS", 0.05)
    async with engine_with(slots=3) as (engine, server):
        server.stuck.add(1)
        for version in range(1, 8):
            await publish(engine, version)
        assert server.names["policy"].name == "policy@7"
    assert "policy@1 was not removed within 0.05 s: its slot is lost" in caplog.text


async def test_every_version_has_a_number_of_its_own() -> None:
    """B106: vLLM's own counter gives it, so it is never 0, used twice, or one of the server's adapters."""
    async with engine_with(slots=3) as (engine, server):
        for version in range(1, 30):
            await publish(engine, version)
        assert server.next_lora_id() == 30


async def test_a_discard_after_the_commit_takes_nothing_away() -> None:
    async with engine_with() as (engine, server):
        await publish(engine, 1)
        await engine.discard(attempt(1))
        assert server.slots_filled == {1}
        assert "policy@1" in server.names


async def test_a_failed_fill_is_a_load_failure_and_the_old_version_serves_on() -> None:
    async with engine_with() as (engine, server):
        await publish(engine, 1)
        server.broken = "1 of 2 tensors found their module"
        await engine.prepare(announced(2), LAYOUT)
        await engine.receive(TransferStarted(attempt(2), ("n",), 5.0))
        with pytest.raises(LoadFailed, match="1 of 2 tensors"):
            await engine.load(attempt(2))
        await engine.discard(attempt(2))
        assert server.names["policy"].name == "policy@1"
        assert "policy@2" not in server.names


async def test_what_a_worker_refuses_takes_no_slot() -> None:
    def strict(worker: int, command: Command) -> Answer | None:
        if isinstance(command, Prepare):
            return Failed(worker, Failure.REFUSED, Reason.UNKNOWN_MODULES, "no such module")
        return Done(worker)

    async with engine_with(slots=2, behaviour=strict) as (engine, _):
        for version in range(1, 5):
            with pytest.raises(Refused, match="unknown_modules: no such module"):
                await engine.prepare(announced(version), LAYOUT)


async def test_a_cancelled_prepare_is_undone_on_the_workers() -> None:
    heard: list[Command] = []

    def silent(worker: int, command: Command) -> Answer | None:
        heard.append(command)
        return None if isinstance(command, Prepare) else Done(worker)

    async with engine_with(behaviour=silent) as (engine, _):
        with anyio.move_on_after(0.1):
            await engine.prepare(announced(1), LAYOUT)
        assert heard[-1] == Discard(attempt(1))


async def test_the_name_of_another_model_is_never_taken_over() -> None:
    async with engine_with() as (engine, _):
        with pytest.raises(Refused, match="name_taken"):
            await engine.prepare(announced(1, "base"), LAYOUT)


async def test_a_manifest_that_does_not_describe_its_layout_is_refused() -> None:
    wrong = AdapterManifest(LAYOUT.digest, "blake3:0", LAYOUT.nbytes + 1, 2, 4)
    async with engine_with() as (engine, _):
        with pytest.raises(Refused, match="does not describe its layout"):
            await engine.prepare(announced(1, manifest=wrong), LAYOUT)


async def test_bytes_are_only_received_for_what_was_prepared() -> None:
    async with engine_with() as (engine, _):
        with pytest.raises(TransferFailed, match="was not prepared"):
            await engine.receive(TransferStarted(attempt(1), ("n",), 1.0))


# ------------------------------------------------------------------------------------- the command line


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_the_server_gets_what_the_bus_needs_and_the_users_flags_win(model: str) -> None:
    command, environment = server_command(
        model, bus="tcp://127.0.0.1:5870", node="left", vllm_args=["--max_loras=8", "--port", "1"], environment={}
    )
    assert command[0] == sys.executable
    assert command[command.index("--model") + 1] == model
    assert "--enable-lora" in command
    assert "--max-loras" not in command
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert command[command.index("--worker-extension-cls") + 1] == WORKER_EXTENSION
    assert "adapterbus" in environment["VLLM_PLUGINS"].split(",")
    assert environment["ADAPTERBUS_ADDRESS"] == "tcp://127.0.0.1:5870"
    assert environment["ADAPTERBUS_NODE"] == "left"


def test_plugins_that_the_user_named_stay_named(model: str) -> None:
    _, environment = server_command(model, bus="tcp://h:1", environment={"VLLM_PLUGINS": "ascend"})
    assert environment["VLLM_PLUGINS"].split(",") == ["adapterbus", "ascend"]


def test_without_a_controller_the_server_stays_off_the_bus(model: str) -> None:
    _, environment = server_command(model, environment={})
    assert environment == {}


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c"])
def test_a_model_path_that_does_not_exist_is_one_sentence(path: str) -> None:
    with pytest.raises(InvalidInput, match=f"no model at {path}"):
        server_command(path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no config\.json"):
        server_command(str(tmp_path))


@pytest.mark.parametrize("flags", [["--pipeline-parallel-size", "2"], ["--api_server_count=3"], ["-dp", "2"]])
def test_settings_that_would_leave_workers_behind_are_refused(model: str, flags: list[str]) -> None:
    with pytest.raises(EngineUnsupported, match="only 1 is supported"):
        server_command(model, vllm_args=flags)
