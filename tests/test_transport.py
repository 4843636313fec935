"""Real sockets on both event loops: nothing is lost, nothing stalls, nothing outlives its block."""

from __future__ import annotations

import functools
import gc
import math
import os
import select
import signal
import socket
import sys
import time
import tracemalloc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from bus.errors import AddressInUse, ChannelClosed, InvalidAddress, InvalidInput, PeerGone, TransportError
from bus.transport import (
    HIGH_WATER_MARK,
    MAX_FRAME_BYTES,
    Dealer,
    Publisher,
    Router,
    Subscriber,
    advertised,
    local_host_towards,
)

pytestmark = pytest.mark.anyio

ANY_PORT = "tcp://127.0.0.1:0"
MESSAGES = 3_000
EXIT_SECONDS = 2.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def absent() -> str:
    """An address where nobody listens: the OS just gave it out and will not soon do so again."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    return f"tcp://127.0.0.1:{port}"


@asynccontextmanager
async def conversation() -> AsyncIterator[tuple[Router, Dealer]]:
    """A router and a dealer `n1` that it has heard, so that it can answer."""
    async with Router.open(ANY_PORT) as router, Dealer.open(router.address, b"n1") as dealer:
        dealer.send_nowait(b"hello")
        with anyio.fail_after(5):
            assert await router.receive() == (b"n1", b"hello")
        yield router, dealer


async def subscribe(publisher: Publisher, *subscribers: Subscriber) -> None:
    """Publishes until every subscriber hears; what follows `go` is all theirs."""
    with anyio.fail_after(5):
        for subscriber in subscribers:
            heard = False
            while not heard:
                publisher.send_nowait(b"probe")
                with anyio.move_on_after(0.05):
                    heard = await subscriber.receive() == b"probe"
        publisher.send_nowait(b"go")
        for subscriber in subscribers:
            while await subscriber.receive() != b"go":
                pass


async def refused(peer: bytes, router: Router) -> PeerGone:
    """Sends until the router says no; the loss of a connection is noticed by its I/O thread, a little later."""
    with anyio.fail_after(5):
        while True:
            try:
                router.send_nowait(peer, b"?")
            except PeerGone as error:
                return error
            await anyio.sleep(0.005)


def flood(send_nowait: Callable[[bytes], None]) -> None:
    """Sends far more than two queues and the kernel's buffers hold."""
    for _ in range(10 * HIGH_WATER_MARK):
        send_nowait(bytes(100_000))


async def receive_with_cancellations(
    send_nowait: Callable[[bytes], None], receive: Callable[[], Awaitable[bytes]]
) -> tuple[list[int], int]:
    """Receives MESSAGES numbers under deadlines of 0 to 0.6 ms, and counts those that cancelled a receive.

    The sender goes on after each burst of five only once a receive was cancelled, so that several hundred are.
    """
    got: list[int] = []
    cancelled = 0

    async def send() -> None:
        for first in range(0, MESSAGES, 5):
            seen = cancelled
            for number in range(first, first + 5):
                send_nowait(b"%d" % number)
                await anyio.lowlevel.checkpoint()
            while cancelled == seen:
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            attempt = 0
            while len(got) < MESSAGES:
                attempt += 1
                with anyio.move_on_after(attempt % 7 * 0.0001) as scope:
                    got.append(int(await receive()))
                cancelled += scope.cancelled_caught
            tasks.cancel_scope.cancel()
    return got, cancelled


# ---------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_router_and_dealer_answer_each_other(scheme: str, tmp_path: Path) -> None:
    bind = ANY_PORT if scheme == "tcp" else f"ipc://{tmp_path}/bus"
    async with Router.open(bind) as router, Dealer.open(router.address, b"n1") as dealer:
        with anyio.fail_after(5):
            dealer.send_nowait(b"\x00question")
            assert await router.receive() == (b"n1", b"\x00question")
            router.send_nowait(b"n1", b"")
            assert await dealer.receive() == b""


async def test_every_subscriber_hears_everything_in_order_once_subscribed() -> None:
    async with (
        Publisher.open(ANY_PORT) as publisher,
        Subscriber.open(publisher.address) as first,
        Subscriber.open(publisher.address) as second,
    ):
        await subscribe(publisher, first, second)
        sent = [b"%d" % number for number in range(100)]
        for body in sent:
            publisher.send_nowait(body)
        with anyio.fail_after(5):
            assert [await first.receive() for _ in sent] == sent
            assert [await second.receive() for _ in sent] == sent
        assert publisher.overflowed == publisher.dropped == 0


async def test_a_message_sent_before_the_controller_listens_is_delivered_when_it_does(absent: str) -> None:
    async with Dealer.open(absent, b"n1") as dealer:
        dealer.send_nowait(b"join")
        async with Router.open(absent) as router:
            with anyio.fail_after(5):
                assert await router.receive() == (b"n1", b"join")


# ------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize("kind", [Router, Publisher])
async def test_port_0_becomes_the_real_port(kind: type[Router | Publisher]) -> None:
    async with kind.open(ANY_PORT) as first, kind.open(ANY_PORT) as second:
        ports = {int(channel.address.removeprefix("tcp://127.0.0.1:")) for channel in (first, second)}
        assert len(ports) == 2
        assert 0 not in ports


async def test_a_host_name_can_be_bound() -> None:
    async with Router.open("tcp://localhost:0") as router:
        assert not router.address.endswith(":0")


@pytest.mark.parametrize("kind", [Router, Publisher])
async def test_a_busy_port_is_address_in_use(kind: type[Router | Publisher]) -> None:
    async with Router.open(ANY_PORT) as router:
        with pytest.raises(AddressInUse, match=router.address):
            async with kind.open(router.address):
                pass


async def test_a_path_somebody_listens_on_is_address_in_use_and_a_stale_one_is_not(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/bus")
    async with Router.open(address):
        with pytest.raises(AddressInUse, match=str(tmp_path)):
            async with Router.open(address):
                pass


MALFORMED = [
    "127.0.0.1:5870",
    "tcp://127.0.0.1",
    "tcp://:5870",
    "tcp://127.0.0.1:port",
    "tcp://127.0.0.1:65536",
    "tcp://::1:5870",
    "tcp://nowhere.invalid:5870",
    "tcp://a..b:5870",
    "udp://127.0.0.1:5870",
    "ipc://",
    "",
]


@pytest.mark.parametrize("address", [*MALFORMED, "tcp://192.0.2.77:0", "ipc:///no/such/directory/bus"])
async def test_what_cannot_be_bound_is_an_invalid_address_that_names_it(address: str) -> None:
    with pytest.raises(InvalidAddress) as caught:
        async with Router.open(address):
            pass
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", [*MALFORMED, "tcp://0.0.0.0:5870", "tcp://*:5870", "tcp://[::]:5870", ANY_PORT])
async def test_what_cannot_be_connected_to_is_an_invalid_address_at_once(address: str) -> None:
    """B030: a wildcard is refused here, not found out by a timeout."""
    with pytest.raises(InvalidAddress) as caught:
        async with Subscriber.open(address):
            pass
    assert repr(address) in str(caught.value)
    with pytest.raises(InvalidAddress):
        local_host_towards(address)


@pytest.mark.parametrize("identity", [b"", b"\0n1", b"n" * 256])
async def test_an_identity_zeromq_would_refuse_is_invalid_input(identity: bytes) -> None:
    with pytest.raises(InvalidInput, match="identity"):
        async with Dealer.open("tcp://127.0.0.1:5870", identity):
            pass


@pytest.mark.parametrize("towards", ["", "tcp://127.0.0.1:5870"])
@pytest.mark.parametrize("bind", ["tcp://*:0", "tcp://0.0.0.0:0"])
async def test_a_wildcard_is_advertised_as_an_address_that_answers(bind: str, towards: str) -> None:
    """B030"""
    async with Router.open(bind) as router:
        address = advertised(router.address, towards)
        assert address.rpartition(":")[2] == router.address.rpartition(":")[2]
        assert "0.0.0.0" not in address
        async with Dealer.open(address, b"n1") as dealer:
            dealer.send_nowait(b"hello")
            with anyio.fail_after(5):
                assert await router.receive() == (b"n1", b"hello")


async def test_a_concrete_address_is_advertised_as_it_is() -> None:
    for bound in ("tcp://127.0.0.1:5870", "tcp://[::1]:5870", "tcp://10.1.2.3:5870", "ipc:///tmp/bus"):
        assert advertised(bound, "tcp://192.0.2.1:1") == bound


async def test_loopback_is_reached_from_loopback() -> None:
    assert local_host_towards("tcp://127.0.0.1:5870") == "127.0.0.1"
    assert local_host_towards("ipc:///tmp/bus") == "127.0.0.1"
    assert advertised("tcp://*:5870", "tcp://127.0.0.1:1") == "tcp://127.0.0.1:5870"


# ---------------------------------------------------------------------------------------------- peers


async def test_a_peer_that_never_connected_is_gone() -> None:
    async with Router.open(ANY_PORT) as router:
        with pytest.raises(PeerGone, match="ghost is not connected"):
            router.send_nowait(b"ghost", b"?")


async def test_a_peer_that_left_is_gone() -> None:
    async with Router.open(ANY_PORT) as router:
        async with Dealer.open(router.address, b"n1") as dealer:
            dealer.send_nowait(b"hello")
            with anyio.fail_after(5):
                await router.receive()
            router.send_nowait(b"n1", b"still here")
        assert "n1 is not connected" in str(await refused(b"n1", router))


async def test_a_peer_that_reads_nothing_is_gone_once_its_queue_is_full() -> None:
    async with conversation() as (router, _silent):
        with pytest.raises(PeerGone, match=rf"n1 does not read: {HIGH_WATER_MARK} "):
            flood(functools.partial(router.send_nowait, b"n1"))


async def test_a_dealer_with_a_full_queue_refuses_instead_of_blocking(absent: str) -> None:
    async with Dealer.open(absent, b"n1") as dealer:
        for _ in range(HIGH_WATER_MARK):
            dealer.send_nowait(b"heartbeat")
        with pytest.raises(TransportError, match=absent):
            dealer.send_nowait(b"one too many")


STOPS_ITSELF = """
import os, signal, sys, anyio
from bus.transport import Dealer

async def main():
    async with Dealer.open(sys.argv[1], b"n1") as dealer:
        dealer.send_nowait(b"first life")
        await dealer.receive()
        os.kill(os.getpid(), signal.SIGSTOP)

anyio.run(main)
"""


async def test_a_restarted_peer_is_heard_though_its_past_life_still_holds_a_connection() -> None:
    """B015: the first life is stopped, not dead, with messages unread: its connection stands, as after a power cut."""
    async with Router.open(ANY_PORT) as router:
        command = [sys.executable, "-c", STOPS_ITSELF, router.address]
        async with await anyio.open_process(command, cwd=Path(__file__).parents[1]) as past:
            try:
                with anyio.fail_after(20):
                    assert await router.receive() == (b"n1", b"first life")
                router.send_nowait(b"n1", b"stop")
                with anyio.fail_after(5):
                    await anyio.to_thread.run_sync(os.waitid, os.P_PID, past.pid, os.WSTOPPED)
                for _ in range(100):
                    router.send_nowait(b"n1", b"never read")
                async with Dealer.open(router.address, b"n1") as dealer:
                    dealer.send_nowait(b"second life")
                    with anyio.fail_after(1):
                        assert await router.receive() == (b"n1", b"second life")
                        router.send_nowait(b"n1", b"welcome back")
                        assert await dealer.receive() == b"welcome back"
            finally:
                past.send_signal(signal.SIGKILL)


# --------------------------------------------------------------------------- cancellation and wake-ups


async def test_cancelled_receives_of_a_dealer_lose_nothing() -> None:
    """B023"""
    async with conversation() as (router, dealer):
        got, cancelled = await receive_with_cancellations(lambda body: router.send_nowait(b"n1", body), dealer.receive)
    assert got == list(range(MESSAGES))
    assert cancelled >= 300


async def test_cancelled_receives_of_a_router_lose_nothing() -> None:
    """B023"""
    async with conversation() as (router, dealer):

        async def receive() -> bytes:
            peer, body = await router.receive()
            assert peer == b"n1"
            return body

        got, cancelled = await receive_with_cancellations(dealer.send_nowait, receive)
    assert got == list(range(MESSAGES))
    assert cancelled >= 300


async def test_cancelled_receives_of_a_subscriber_lose_nothing() -> None:
    """B023"""
    async with Publisher.open(ANY_PORT) as publisher, Subscriber.open(publisher.address) as subscriber:
        await subscribe(publisher, subscriber)
        got, cancelled = await receive_with_cancellations(publisher.send_nowait, subscriber.receive)
    assert got == list(range(MESSAGES))
    assert cancelled >= 300


@pytest.mark.parametrize("waiting", ["dealer", "router"])
async def test_a_send_on_the_socket_of_a_parked_receiver_does_not_stall_it(waiting: str) -> None:
    """The send comes between the signal and the event loop's look at it, and takes the signal away."""
    async with conversation() as (router, dealer):
        arrived, arrivals = anyio.create_memory_object_stream[object](math.inf)
        channel = dealer if waiting == "dealer" else router
        ask: Callable[[], None] = functools.partial(dealer.send_nowait, b"up")
        answer: Callable[[], None] = functools.partial(router.send_nowait, b"n1", b"down")
        send_to_it, send_on_it = (answer, ask) if waiting == "dealer" else (ask, answer)

        async def receive() -> None:
            while True:
                arrived.send_nowait(await channel.receive())

        async with arrived, arrivals, anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            for _ in range(300):
                while "parked" not in repr(channel):
                    await anyio.lowlevel.checkpoint()
                send_to_it()
                assert select.select([channel._descriptor], [], [], 5)[0]
                send_on_it()
                with anyio.fail_after(5):
                    await arrivals.receive()
            tasks.cancel_scope.cancel()


async def test_a_second_receiver_is_told_that_the_socket_is_busy() -> None:
    async with conversation() as (router, dealer), anyio.create_task_group() as tasks:
        tasks.start_soon(dealer.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await dealer.receive()
        assert "receiver parked" in repr(dealer)
        router.send_nowait(b"n1", b"the first one's")


# --------------------------------------------------------------------------------------- bad neighbours


async def test_an_oversized_frame_is_refused_where_it_is_sent() -> None:
    async with conversation() as (router, dealer), Publisher.open(ANY_PORT) as publisher:
        for send in (dealer.send_nowait, publisher.send_nowait, lambda body: router.send_nowait(b"n1", body)):
            with pytest.raises(TransportError, match="over the limit"):
                send(bytes(MAX_FRAME_BYTES + 1))


async def test_an_oversized_frame_of_a_stranger_is_rejected_and_the_others_are_heard() -> None:
    async with conversation() as (router, dealer), Dealer.open(router.address, b"n2") as stranger:
        stranger._socket.send(bytes(MAX_FRAME_BYTES + 1))
        assert "n2" in str(await refused(b"n2", router))
        dealer.send_nowait(b"unmoved")
        with anyio.fail_after(5):
            assert await router.receive() == (b"n1", b"unmoved")


async def test_messages_of_the_wrong_shape_are_dropped_and_counted() -> None:
    async with conversation() as (router, dealer):
        dealer._socket.send_multipart([b"", b"with a delimiter, as a REQ would"])
        dealer.send_nowait(b"well formed")
        router._socket.send_multipart([b"n1", b"one", b"two"])
        router.send_nowait(b"n1", b"well formed")
        with anyio.fail_after(5):
            assert await router.receive() == (b"n1", b"well formed")
            assert await dealer.receive() == b"well formed"
        assert (router.dropped, dealer.dropped) == (1, 1)


async def test_a_subscriber_that_reads_nothing_costs_only_itself_and_is_counted() -> None:
    async with (
        Publisher.open(ANY_PORT) as publisher,
        Subscriber.open(publisher.address) as reader,
        Subscriber.open(publisher.address) as sleeper,
    ):
        await subscribe(publisher, reader, sleeper)
        number = 0

        async def publish() -> None:
            nonlocal number
            body = b"%d" % number + bytes(20_000)
            publisher.send_nowait(body)
            assert await reader.receive() == body
            number += 1

        for times in (1, 2):
            with anyio.fail_after(30):
                while publisher.overflowed < times:
                    await publish()
                for _ in range(100):
                    await publish()
            reading = True
            while reading:
                with anyio.move_on_after(0.2) as scope:
                    await sleeper.receive()
                reading = not scope.cancelled_caught
        assert publisher.overflowed == 2
        assert number > 2 * HIGH_WATER_MARK


# -------------------------------------------------------------------------------------------- leaving


OPENINGS: dict[str, Callable[[str], AbstractAsyncContextManager[Router | Dealer | Subscriber]]] = {
    "Router": lambda _: Router.open(ANY_PORT),
    "Dealer": lambda absent: Dealer.open(absent, b"n1"),
    "Subscriber": lambda absent: Subscriber.open(absent),
}


@pytest.mark.parametrize("kind", list(OPENINGS))
async def test_closing_raises_channel_closed_in_a_parked_receiver(kind: str, absent: str) -> None:
    caught: list[ChannelClosed] = []

    async def receive(channel: Router | Dealer | Subscriber) -> None:
        try:
            await channel.receive()
        except ChannelClosed as error:
            caught.append(error)

    with anyio.fail_after(EXIT_SECONDS):
        async with anyio.create_task_group() as tasks, OPENINGS[kind](absent) as channel:
            tasks.start_soon(receive, channel)
            await anyio.wait_all_tasks_blocked()
    assert str(caught[0]).startswith(kind)


async def test_a_closed_channel_says_so() -> None:
    async with Router.open(ANY_PORT) as router, Publisher.open(ANY_PORT) as publisher:
        pass
    with pytest.raises(ChannelClosed, match=router.address):
        await router.receive()
    with pytest.raises(ChannelClosed):
        router.send_nowait(b"n1", b"?")
    with pytest.raises(ChannelClosed):
        publisher.send_nowait(b"?")


@pytest.mark.parametrize("how", ["normally", "by an error", "by cancellation"])
async def test_leaving_with_unsent_messages_is_bounded_and_leaves_nothing_behind(how: str, absent: str) -> None:
    """B006"""

    async def leave() -> None:
        with anyio.CancelScope() as scope:
            async with Dealer.open(absent, b"n1") as dealer:
                dealer.send_nowait(b"join")
                if how == "by an error":
                    raise LookupError
                if how == "by cancellation":
                    scope.cancel()
                    await anyio.sleep_forever()

    async with Subscriber.open(absent):  # starts the worker thread that every later close shares
        pass
    threads = len(os.listdir("/proc/self/task"))
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if how == "by an error":
            with pytest.raises(LookupError):
                await leave()
        else:
            await leave()
        assert time.monotonic() - started < EXIT_SECONDS
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
    assert len(os.listdir("/proc/self/task")) <= threads


async def test_leaving_with_a_peer_that_reads_nothing_is_bounded() -> None:
    """B006: a connection that stands but takes no more bytes."""
    async with Router.open(ANY_PORT) as silent:
        async with Dealer.open(silent.address, b"n1") as dealer:
            with pytest.raises(PeerGone):
                flood(dealer.send_nowait)
            started = time.monotonic()
        assert time.monotonic() - started < EXIT_SECONDS


async def test_the_last_message_before_leaving_arrives() -> None:
    async with conversation() as (router, _):
        async with Dealer.open(router.address, b"n2") as leaver:
            leaver.send_nowait(b"goodbye")
        with anyio.fail_after(5):
            assert await router.receive() == (b"n2", b"goodbye")


async def test_received_bodies_do_not_stay_in_memory_until_a_timer_ends() -> None:
    """B122."""
    body = bytes(1_000_000)
    async with Router.open("tcp://127.0.0.1:0") as router, Dealer.open(router.address, b"node") as dealer:
        dealer.send_nowait(b"hello")
        peer, _ = await router.receive()
        tracemalloc.start()
        for _ in range(200):
            router.send_nowait(peer, body)
            with anyio.fail_after(60):
                assert len(await dealer.receive()) == len(body)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < 10 * len(body)
