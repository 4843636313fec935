"""The controller's shell on real sockets: what it drops, what it answers, whom it believes."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from bus.client import Connection, Joined, new_peer
from bus.codec import EVENT_CODEC
from bus.controller import Controller
from bus.errors import JoinFailed
from bus.events import (
    Envelope,
    Event,
    JoinAccepted,
    JoinRequested,
    NodeAlive,
    Peer,
    PeerUnknown,
    Role,
    StatusReported,
    StatusRequested,
)
from bus.protocol import Timeouts
from bus.transport import Dealer
from tests.fakes import capabilities

pytestmark = pytest.mark.anyio

QUICK = Timeouts(heartbeat=0.05, lease=0.5)
ANY_PORT = "tcp://127.0.0.1:0"


@asynccontextmanager
async def raw_peer(controller: Controller, identity: str) -> AsyncIterator[Dealer]:
    async with Dealer.open(controller.address, identity.encode()) as dealer:
        yield dealer


def frame(event: Event) -> bytes:
    return EVENT_CODEC.encode(Envelope("", 0, event))


async def answer(dealer: Dealer) -> Event:
    with anyio.fail_after(3):
        event: Event = EVENT_CODEC.decode(await dealer.receive()).event
        return event


class MakesAMarker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


async def test_a_pickle_is_counted_and_dropped_and_honest_peers_go_on(tmp_path: Path) -> None:
    """B005."""
    marker = tmp_path / "marker"
    async with Controller.open(ANY_PORT, timeouts=QUICK) as controller, raw_peer(controller, "evil/1") as evil:
        evil.send_nowait(pickle.dumps(MakesAMarker(marker)))
        evil.send_nowait(b"")
        peer = Peer("evil", "1")
        evil.send_nowait(frame(JoinRequested(peer, Role.OBSERVER)))
        assert isinstance(await answer(evil), JoinAccepted)
        assert controller.counters["malformed"] == 2
    assert not marker.exists()


async def test_nobody_speaks_in_the_name_of_another() -> None:
    async with Controller.open(ANY_PORT, timeouts=QUICK) as controller, raw_peer(controller, "evil/1") as evil:
        evil.send_nowait(frame(JoinRequested(Peer("victim", "1"), Role.ROLLOUT, capabilities=capabilities())))
        evil.send_nowait(frame(NodeAlive(Peer("evil", "1"), 0)))
        assert await answer(evil) == PeerUnknown(Peer("evil", "1"))
        assert controller.counters["malformed"] == 1


async def test_an_answer_to_a_peer_that_is_gone_is_counted_and_its_lease_ends() -> None:
    """B078."""
    async with Controller.open(ANY_PORT, timeouts=QUICK) as controller:
        async with raw_peer(controller, "brief/1") as brief:
            brief.send_nowait(frame(JoinRequested(Peer("brief", "1"), Role.ROLLOUT, capabilities=capabilities())))
            assert isinstance(await answer(brief), JoinAccepted)
        async with Connection.open(controller.address, new_peer(), Role.OBSERVER) as observer:
            with anyio.fail_after(5):
                while True:
                    observer.send(StatusRequested(observer.peer))
                    event = await observer.receive()
                    if isinstance(event, StatusReported) and not event.nodes:
                        break


async def test_a_node_that_was_replaced_is_told_that_its_name_is_taken() -> None:
    """Two nodes with one id: the later one stays, the earlier one hears why."""
    async with Controller.open(ANY_PORT, timeouts=QUICK) as controller:
        with pytest.raises(JoinFailed, match="another process joined as twin"):
            async with (
                Connection.open(controller.address, new_peer("twin"), Role.ROLLOUT, capabilities=capabilities()),
                Connection.open(controller.address, new_peer("twin"), Role.ROLLOUT, capabilities=capabilities()),
            ):
                await anyio.sleep(3)


async def test_a_connection_survives_a_controller_that_comes_back(tmp_path: Path) -> None:
    """B076: it notices the new run, joins again, and hears what is published."""
    journal = tmp_path / "journal.db"
    runs: list[str] = []
    joined = [anyio.Event(), anyio.Event()]

    async def stay(address: str) -> None:
        async with Connection.open(address, new_peer("n"), Role.ROLLOUT, capabilities=capabilities()) as connection:
            while len(runs) < 2:
                event = await connection.receive()
                if isinstance(event, Joined):
                    await connection.wait_following()
                    runs.append(event.run)
                    joined[len(runs) - 1].set()

    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            async with Controller.open(ANY_PORT, journal=journal, timeouts=QUICK) as first:
                tasks.start_soon(stay, first.address)
                await joined[0].wait()
            async with Controller.open(first.address, journal=journal, timeouts=QUICK) as second:
                await joined[1].wait()
    assert runs == [first.run, second.run]
