"""Groups by view over real Gloo: exact bytes, named culprits, deadlines that hold, and processes that can exit."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
import torch.distributed as dist
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from torch._C._distributed_c10d import HashStore, TCPStore

from bus.collective import AdapterBuffer, Collective, RendezvousStore, backend_for
from bus.errors import InvalidAddress, InvalidInput, InvalidLayout, RendezvousFailed, TransferFailed
from bus.manifest import AdapterLayout, AdapterManifest, BaseModel, TensorSpec, digest_of

pytestmark = pytest.mark.anyio

A, B = "base_model.model.layer.lora_A.weight", "base_model.model.layer.lora_B.weight"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def layout_of(*tensors: tuple[str, str, tuple[int, ...]]) -> AdapterLayout:
    return AdapterLayout(BaseModel("tiny", "f"), "{}", tuple(TensorSpec(*tensor) for tensor in tensors))


def random_bytes(nbytes: int) -> AdapterBuffer:
    buffer = AdapterBuffer(nbytes)
    buffer._bytes.random_(0, 256, generator=torch.Generator().manual_seed(7))
    return buffer


def manifest_of(buffer: AdapterBuffer, nbytes: int, chunk_bytes: int) -> AdapterManifest:
    return AdapterManifest("blake3:layout", buffer.digest(nbytes), nbytes, 2, 1, chunk_bytes)


def content(buffer: AdapterBuffer) -> bytes:
    return bytes(buffer._bytes.numpy())


@contextmanager
def lasting_less_than(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


async def join_all(members: Sequence[Collective], view: int, store: str) -> None:
    async with anyio.create_task_group() as joining:
        for rank, member in enumerate(members):
            joining.start_soon(
                partial(member.join, view, rank=rank, size=len(members), store=store, timeout=10), name=f"rank {rank}"
            )


@asynccontextmanager
async def fleet(size: int) -> AsyncIterator[tuple[list[Collective], str]]:
    """Members in one process, in view 1, and the address of their store."""
    with closing(RendezvousStore("127.0.0.1")) as store:
        async with AsyncExitStack() as stack:
            members = [await stack.enter_async_context(Collective()) for _ in range(size)]
            await join_all(members, 1, store.address)
            yield members, store.address


async def deliver(
    members: Sequence[Collective],
    buffers: Sequence[AdapterBuffer],
    manifest: AdapterManifest,
    ranks: Sequence[int],
    view: int = 1,
) -> dict[int, str]:
    """Transfer from rank 0 to `ranks`; the digest that each of them returns."""
    digests: dict[int, str] = {}

    async def take_part(rank: int) -> None:
        digests[rank] = await members[rank].transfer(view, buffers[rank], manifest, audience=ranks, timeout=10)

    async with anyio.create_task_group() as transferring:
        for rank in (0, *ranks):
            transferring.start_soon(take_part, rank)
    return digests


# ---------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
async def test_every_dtype_arrives_bit_for_bit(dtype: str) -> None:
    """B041: Gloo knows no float8; bytes are what travels."""
    layout = layout_of((A, dtype, (2, 5)), (B, dtype, (5, 2)))
    sent = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in ((A, (2, 5)), (B, (5, 2)))}
    buffers = [AdapterBuffer(layout.nbytes) for _ in range(2)]
    buffers[0].pack(layout, sent)
    manifest = AdapterManifest.of(layout, buffers[0].digest(layout.nbytes))
    async with fleet(2) as (members, _):
        assert await deliver(members, buffers, manifest, [1]) == dict.fromkeys((0, 1), manifest.digest)
    received = buffers[1].views(layout)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_transposed_view_is_packed_in_its_own_order() -> None:
    """B048."""
    layout = layout_of((A, "float32", (2, 3)), (B, "float32", (3, 2)))
    buffer = AdapterBuffer(layout.nbytes)
    buffer.pack(layout, {A: torch.zeros(2, 3), B: torch.arange(6.0).reshape(2, 3).t()})
    assert buffer.views(layout)[B].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_mixed_dtypes_keep_the_order_of_the_manifest() -> None:
    """B111."""
    other = A.replace("layer", "other")
    layout = layout_of(
        (A, "bfloat16", (1, 4)),
        (B, "float32", (4, 1)),
        (other, "bfloat16", (1, 4)),
        (other.replace("_A", "_B"), "bfloat16", (4, 1)),
    )
    buffer = AdapterBuffer(layout.nbytes)
    values = {spec.name: torch.full(spec.shape, float(value)) for value, spec in enumerate(layout.tensors, 1)}
    buffer.pack(layout, dict(reversed(values.items())))
    assert {name: view.flatten().tolist() for name, view in buffer.views(layout).items()} == {
        name: tensor.flatten().tolist() for name, tensor in values.items()
    }


def test_parameters_in_training_are_cast_on_the_way() -> None:
    layout = layout_of((A, "bfloat16", (2, 3)), (B, "bfloat16", (3, 2)))
    weights = {spec.name: torch.nn.Parameter(torch.randn(spec.shape)) for spec in layout.tensors}
    buffer = AdapterBuffer(layout.nbytes)
    buffer.pack(layout, weights)
    for name, view in buffer.views(layout).items():
        assert torch.equal(view, weights[name].detach().to(torch.bfloat16))
        assert not view.requires_grad


def test_padding_is_zero_whatever_the_buffer_held_before() -> None:
    layout = layout_of((A, "float16", (1, 3)), (B, "float16", (3, 1)))
    fresh, used = AdapterBuffer(layout.nbytes), random_bytes(layout.nbytes)
    for buffer in (fresh, used):
        buffer.pack(layout, {A: torch.ones(1, 3), B: torch.ones(3, 1)})
    assert content(fresh) == content(used)
    assert used.digest(layout.nbytes) == digest_of(content(fresh))


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        ({A: torch.ones(1, 3)}, (B,)),
        ({A: torch.ones(1, 3), B: torch.ones(3, 1), "bias": torch.ones(1)}, ("bias",)),
        ({A: torch.ones(3, 1), B: torch.ones(3, 1)}, (A,)),
    ],
    ids=["missing", "extra", "wrong shape"],
)
def test_tensors_unlike_the_layout_are_named_and_nothing_is_written(
    tensors: dict[str, torch.Tensor], names: tuple[str, ...]
) -> None:
    layout = layout_of((A, "float16", (1, 3)), (B, "float16", (3, 1)))
    buffer = AdapterBuffer(layout.nbytes)
    with pytest.raises(InvalidLayout) as caught:
        buffer.pack(layout, tensors)
    assert caught.value.names == names
    assert not any(content(buffer))


def test_a_layout_larger_than_the_buffer_is_refused() -> None:
    layout = layout_of((A, "float16", (1, 3)), (B, "float16", (3, 1)))
    with pytest.raises(InvalidLayout, match=f"{layout.nbytes} bytes"):
        AdapterBuffer(layout.nbytes - 1).views(layout)


# --------------------------------------------------------------------------------------------- transfers


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1000, 1001])
async def test_chunks_may_cut_tensors_anywhere(chunk_bytes: int) -> None:
    """B071, B112: both sides cut by what the manifest says."""
    source = random_bytes(1000)
    buffers = [source, AdapterBuffer(1000), AdapterBuffer(1000)]
    manifest = manifest_of(source, 1000, chunk_bytes)
    async with fleet(3) as (members, _):
        digests = await deliver(members, buffers, manifest, [1, 2])
    assert digests == dict.fromkeys((0, 1, 2), manifest.digest)
    assert content(buffers[1]) == content(buffers[2]) == content(source)


async def test_a_transfer_to_some_leaves_the_others_and_the_group_as_they_were() -> None:
    source = random_bytes(1000)
    buffers = [source, AdapterBuffer(1000), AdapterBuffer(1000)]
    manifest = manifest_of(source, 1000, 300)
    async with fleet(3) as (members, _):
        assert await deliver(members, buffers, manifest, [2]) == dict.fromkeys((0, 2), manifest.digest)
        assert content(buffers[2]) == content(source)
        assert not any(content(buffers[1]))
        assert (await deliver(members, buffers, manifest, [1, 2]))[1] == manifest.digest


async def test_the_digest_is_that_of_the_bytes_not_of_the_manifest() -> None:
    source = random_bytes(100)
    buffers = [source, AdapterBuffer(100)]
    manifest = manifest_of(source, 100, 64)
    source._bytes[50] ^= 1
    async with fleet(2) as (members, _):
        digests = await deliver(members, buffers, manifest, [1])
    assert digests == dict.fromkeys((0, 1), digest_of(content(source)))
    assert digests[1] != manifest.digest


async def test_a_transfer_without_a_group_fails_at_once() -> None:
    """B115."""
    buffer = AdapterBuffer(8)
    async with Collective() as alone:
        with lasting_less_than(1), pytest.raises(TransferFailed, match="in no group"):
            await alone.transfer(1, buffer, manifest_of(buffer, 8, 8), audience=[1], timeout=60)


async def test_a_manifest_larger_than_the_buffer_fails_at_once() -> None:
    async with fleet(2) as (members, _):
        with lasting_less_than(1), pytest.raises(TransferFailed, match="9 bytes"):
            await members[1].transfer(
                1, AdapterBuffer(8), manifest_of(AdapterBuffer(9), 9, 9), audience=[1], timeout=60
            )


async def test_the_default_group_is_left_alone_whoever_comes_first() -> None:
    """B031."""
    source = random_bytes(100)
    buffers = [source, AdapterBuffer(100)]
    manifest = manifest_of(source, 100, 100)
    async with fleet(2) as (members, store):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            await join_all(members, 2, store)
            for view in (1, 2):
                assert (await deliver(members, buffers, manifest, [1], view))[1] == manifest.digest
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size() == 1
        finally:
            dist.destroy_process_group()


async def test_a_member_that_stays_out_fails_the_transfer_at_the_deadline_and_a_new_view_works() -> None:
    source = random_bytes(1000)
    manifest = manifest_of(source, 1000, 300)
    async with fleet(3) as (members, store):

        async def fail(rank: int) -> None:
            with pytest.raises(TransferFailed):
                await members[rank].transfer(1, random_bytes(1000), manifest, audience=[1, 2], timeout=0.5)
            assert not members[rank].views

        with lasting_less_than(3):
            async with anyio.create_task_group() as transferring:
                transferring.start_soon(fail, 0)
                transferring.start_soon(fail, 1)
        await join_all(members[:2], 2, store)
        assert (await deliver(members, [source, AdapterBuffer(1000)], manifest, [1], view=2))[1] == manifest.digest


async def test_a_chunk_that_stalls_fails_long_before_the_transfer_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.collective.CHUNK_GRACE", 0.3)
    buffer = AdapterBuffer(100)
    async with fleet(2) as (members, _):
        with lasting_less_than(3), pytest.raises(TransferFailed):
            await members[1].transfer(1, buffer, manifest_of(buffer, 100, 100), audience=[1], timeout=60)


async def test_an_abandoned_transfer_never_writes_into_the_buffer_again() -> None:
    source, staging = random_bytes(1000), AdapterBuffer(1000)
    manifest = manifest_of(source, 1000, 1000)
    async with fleet(2) as (members, _):
        with anyio.move_on_after(0.2) as scope:
            await members[1].transfer(1, staging, manifest, audience=[1], timeout=10)
        assert scope.cancelled_caught
        assert 1 not in members[1].views
        staging._bytes.fill_(9)
        # The receive that nobody waits for is still there, and takes the late bytes.
        assert await members[0].transfer(1, source, manifest, audience=[1], timeout=10) == manifest.digest
    assert set(content(staging)) == {9}


async def test_a_transfer_that_broke_off_leaves_the_sender_its_bytes_for_the_next_try() -> None:
    """B088: the retry, and every later joiner of a head, are sent from this buffer."""
    nbytes = 32 * 1024 * 1024  # more than the sockets hold: the sender is still in it when the deadline passes
    source = random_bytes(nbytes)
    manifest = manifest_of(source, nbytes, nbytes)
    async with fleet(2) as (members, store):
        with pytest.raises(TransferFailed):
            await members[0].transfer(1, source, manifest, audience=[1], timeout=0.3)
        assert source.digest(nbytes) == manifest.digest
        await join_all(members, 2, store)
        assert (await deliver(members, [source, AdapterBuffer(nbytes)], manifest, [1], view=2))[1] == manifest.digest


async def test_leaving_ends_a_transfer_and_closes_the_group() -> None:
    buffer = AdapterBuffer(100)
    async with fleet(2) as (members, _), anyio.create_task_group() as tasks:

        async def receive() -> None:
            with lasting_less_than(5), pytest.raises(TransferFailed, match="abandoned"):
                await members[1].transfer(1, buffer, manifest_of(buffer, 100, 100), audience=[1], timeout=60)

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        await members[1].leave(1)
        await members[1].leave(1)
        assert not members[1].views


async def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    async with fleet(3) as (members, _):
        assert {member.views for member in members} == {frozenset({1})}
        threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("collective-")]
        assert len(threads) == 3
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


# -------------------------------------------------------------------------------------------- rendezvous


async def test_a_rank_that_stays_away_is_named_in_time() -> None:
    """B090: every other rank learns which one, and where it was awaited."""
    with closing(RendezvousStore("127.0.0.1")) as store:

        async def miss(rank: int) -> None:
            async with Collective() as member:
                with pytest.raises(RendezvousFailed, match=f"rank {rank} waited for ranks 2 in view/5/") as caught:
                    await member.join(5, rank=rank, size=4, store=store.address, timeout=0.5)
                assert caught.value.missing == (2,)
                assert not member.views

        with lasting_less_than(3):
            async with anyio.create_task_group() as joining:
                for rank in (0, 1, 3):
                    joining.start_soon(miss, rank)


async def test_two_runs_that_count_views_alike_do_not_meet_in_one_store() -> None:
    """B090: the prefix comes with the view; keys of another run are not ours."""
    async with fleet(1) as (_, store), Collective() as first, Collective() as second:
        await join_all([first], 7, f"{store}/run-a")
        await join_all([second], 7, f"{store}/run-b")
        assert first.views == second.views == {7}


async def test_a_store_that_never_answers_means_that_rank_0_is_missing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        async with Collective() as member:
            with lasting_less_than(3), pytest.raises(RendezvousFailed, match="waited for the store") as caught:
                await member.join(1, rank=1, size=2, store=f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.4)
            assert caught.value.missing == (0,)


async def test_a_store_that_comes_up_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """B049."""
    refused = threading.Event()
    connect = socket.create_connection

    def observed(*args: Any, **kwargs: Any) -> socket.socket:
        try:
            return connect(*args, **kwargs)
        except ConnectionRefusedError:
            refused.set()
            raise

    monkeypatch.setattr(socket, "create_connection", observed)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        async with Collective() as first, Collective() as second, anyio.create_task_group() as joining:
            joining.start_soon(join_all, (first, second), 1, f"127.0.0.1:{port}")
            await anyio.to_thread.run_sync(refused.wait, 5)
            listener.listen()
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        assert not first.views
    del store


async def test_a_cancelled_join_gives_the_place_up_and_others_do_not_wait_for_it_in_a_new_view() -> None:
    with closing(RendezvousStore("127.0.0.1")) as store:
        async with Collective() as first, Collective() as second:
            with anyio.move_on_after(0.1) as scope:
                await first.join(1, rank=0, size=2, store=store.address, timeout=10)
            assert scope.cancelled_caught
            assert not first.views
            with pytest.raises(RendezvousFailed):
                await second.join(1, rank=1, size=2, store=store.address, timeout=0.3)
            await join_all((first, second), 2, store.address)
            assert first.views == second.views == {2}


async def test_leaving_a_view_that_still_forms_ends_the_join_at_once() -> None:
    with closing(RendezvousStore("127.0.0.1")) as store:
        async with Collective() as member, anyio.create_task_group() as tasks:

            async def join() -> None:
                with lasting_less_than(5), pytest.raises(RendezvousFailed, match="abandoned"):
                    await member.join(1, rank=0, size=2, store=store.address, timeout=60)

            tasks.start_soon(join)
            await anyio.wait_all_tasks_blocked()
            await member.leave(1)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "192.0.2.1"])
def test_a_store_listens_only_where_others_can_connect(host: str) -> None:
    with pytest.raises(InvalidAddress):
        RendezvousStore(host)


@pytest.mark.parametrize("store", ["127.0.0.1", "127.0.0.1:0", ":80", "127.0.0.1:port"])
async def test_a_store_without_host_and_port_is_refused(store: str) -> None:
    async with Collective() as member:
        with pytest.raises(InvalidAddress):
            await member.join(1, rank=0, size=1, store=store, timeout=1)


def test_each_device_has_its_backend() -> None:
    assert {device: backend_for(device) for device in ("cpu", "cuda:1", "npu", "xpu:0")} == {
        "cpu": "gloo",
        "cuda:1": "nccl",
        "npu": "hccl",
        "xpu:0": "xccl",
    }
    with pytest.raises(InvalidInput, match="tpu"):
        backend_for("tpu")


def test_a_backend_that_torch_lacks_is_refused_before_any_group() -> None:
    with pytest.raises(InvalidInput, match="no backend 'hccl' for device 'npu'"):
        Collective("npu")
    assert Collective("npu", backend="gloo").backend == "gloo"


# --------------------------------------------------------------------------------------- several processes


class Member:
    """A process with a Collective of its own, told what to do line by line."""

    def __init__(self, process: Process) -> None:
        assert process.stdin
        assert process.stdout
        self.process = process
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def tell(self, **command: Any) -> None:
        await self._stdin.send(json.dumps(command).encode() + b"\n")

    async def hear(self) -> Any:
        return json.loads(await self._stdout.receive_until(b"\n", 10_000))

    async def ask(self, **command: Any) -> Any:
        await self.tell(**command)
        return await self.hear()


@asynccontextmanager
async def processes(count: int) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        members = []
        for loop in ("asyncio", "trio")[:count]:
            process = await anyio.open_process(
                [sys.executable, "-m", "tests.test_collective", loop], cwd=Path(__file__).parent.parent, stderr=None
            )
            stack.push_async_callback(process.aclose)
            stack.callback(_kill, process)
            members.append(Member(process))
        for member in members:  # importing torch takes long, and is no part of any deadline
            assert await member.hear() == "up"
        yield members


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


HOSTED: list[RendezvousStore] = []
"""Stores that live until the interpreter takes its modules apart."""


async def obey(collective: Collective, do: str, view: int, **details: Any) -> str:
    if do == "wait alone":
        HOSTED.append(RendezvousStore("127.0.0.1"))
        with anyio.move_on_after(0.1):
            await collective.join(view, rank=0, size=2, store=HOSTED[-1].address, timeout=30)
        return "cancelled"
    if do == "join":
        await collective.join(view, **details)
        return "joined"
    nbytes, chunk, audience, timeout = (details[key] for key in ("nbytes", "chunk", "audience", "timeout"))
    buffer = AdapterBuffer(nbytes)
    with anyio.move_on_after(details.get("cancel_after")):
        return await collective.transfer(
            view, buffer, AdapterManifest("blake3:layout", "", nbytes, 2, 1, chunk), audience=audience, timeout=timeout
        )
    return "cancelled"


async def be_a_member() -> None:
    collective = Collective()
    print(json.dumps("up"), flush=True)
    async for line in anyio.wrap_file(sys.stdin):
        command = json.loads(line)
        if command["do"] == "exit":
            break
        try:
            answer = await obey(collective, **command)
        except (RendezvousFailed, TransferFailed) as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)


async def join_with(me: Collective, others: Sequence[Member], view: int, store: str) -> None:
    size = len(others) + 1
    async with anyio.create_task_group() as joining:
        joining.start_soon(partial(me.join, view, rank=0, size=size, store=store, timeout=20))
        for rank, other in enumerate(others, 1):
            joining.start_soon(partial(other.ask, do="join", view=view, rank=rank, size=size, store=store, timeout=20))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_member_killed_in_mid_transfer_fails_it_at_once_and_the_rest_form_a_new_view() -> None:
    source = random_bytes(10_000)
    manifest = manifest_of(source, 10_000, 1000)
    whole = {"do": "transfer", "nbytes": 10_000, "chunk": 1000, "timeout": 30}
    with closing(RendezvousStore("127.0.0.1")) as store:
        async with Collective() as me, processes(2) as (survivor, victim):
            await join_with(me, [survivor, victim], 1, store.address)
            await survivor.tell(view=1, audience=[1, 2], **whole)
            await victim.tell(view=1, audience=[1, 2], **whole)
            assert await me.transfer(1, source, manifest, audience=[1, 2], timeout=30) == manifest.digest
            assert await survivor.hear() == await victim.hear() == manifest.digest

            await survivor.tell(view=1, audience=[1, 2], **whole)
            await victim.tell(view=1, audience=[1, 2], **whole | {"nbytes": 5000})

            async def kill_half_way() -> None:
                assert await victim.hear() == digest_of(content(source)[:5000])
                victim.process.kill()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill_half_way)
                with lasting_less_than(5), pytest.raises(TransferFailed, match=r"(?i)connection"):
                    await me.transfer(1, source, manifest, audience=[1, 2], timeout=30)
                assert await survivor.hear() == "TransferFailed"

            await join_with(me, [survivor], 2, store.address)
            await survivor.tell(view=2, audience=[1], **whole)
            source._bytes.copy_(random_bytes(10_000)._bytes)
            assert await me.transfer(2, source, manifest, audience=[1], timeout=30) == manifest.digest
            assert await survivor.hear() == manifest.digest


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_stopped_member_is_noticed_at_the_deadline_and_a_blocked_process_can_exit() -> None:
    source = random_bytes(10_000)
    manifest = manifest_of(source, 10_000, 1000)
    with closing(RendezvousStore("127.0.0.1")) as store:
        async with Collective() as me, processes(1) as (member,):
            await join_with(me, [member], 1, store.address)
            member.process.send_signal(signal.SIGSTOP)
            with lasting_less_than(6), pytest.raises(TransferFailed):
                await me.transfer(1, source, manifest, audience=[1], timeout=1)

            member.process.send_signal(signal.SIGCONT)
            await join_with(me, [member], 2, store.address)
            assert me.views == {2}
            # What is cancelled here ends in name only: threads still wait when the interpreter shuts down.
            await member.tell(
                do="transfer", view=2, nbytes=10_000, chunk=1000, audience=[1], timeout=30, cancel_after=0.1
            )
            assert await member.hear() == "cancelled"
            assert await member.ask(do="wait alone", view=3) == "cancelled"
            with lasting_less_than(15):
                await member.tell(do="exit")
                assert await member.process.wait() == 0


if __name__ == "__main__":
    anyio.run(be_a_member, backend=sys.argv[1])
