"""Controller, trainer and rollout nodes as processes of their own, over real ZeroMQ, real Gloo and a real journal.

A forked server has torch imported already, so that a process starts in milliseconds. `Process` is the test's end.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final
from unittest.mock import patch

import anyio
import torch
import zmq

from bus import transport
from bus.controller import Controller
from bus.errors import LoadFailed, Refused, TransferFailed, UpdateFailed
from bus.events import Attempt, Event, Reason, ViewProposed
from bus.follower import follow
from bus.journal import SqliteJournal
from bus.protocol import Timeouts, Transmit
from tests.fakes import LightEngine, layout
from tests.faults.gates import GO, Gates
from trainer_node.exported import ExportedAdapter
from trainer_node.publisher import AdapterPublisher
from trainer_node.session import Session

ADAPTER: Final = "policy"
SHORT: Final = Timeouts(
    heartbeat=0.25, lease=1.5, view=2.5, ready=2.5, transfer=2.5, load=2.5, activate=2.0, publish=15.0
)
"""The lease ends first: whoever is silent is found out by that, and each phase's own deadline is for the alive."""
PATIENCE: Final = 20.0
"""Seconds after which something that a test waits for counts as never happening."""

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload([__name__])


class Process:
    """A process under test. What it says is kept in `said`; `wait` waits for words that a test needs to hear."""

    def __init__(self, name: str, main: Callable[..., None], *args: Any) -> None:
        self.name = name
        self.said: list[tuple[Any, ...]] = []
        self._heard = threading.Condition()
        self._line, theirs = _forked.Pipe()
        self._process = _forked.Process(target=_run, args=(theirs, main, *args), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, name=f"hears {name}", daemon=True)
        self._listener.start()

    def __repr__(self) -> str:
        return f"<{self.name}, pid {self._process.pid}, said {len(self.said)} things>"

    def order(self, *words: Any) -> None:
        self._line.send(words)

    def hold(self, gate: str) -> None:
        """The process is to wait when it next comes to this gate."""
        self.order("hold", gate)
        self.wait("held", gate)

    def release(self, gate: str, verb: str = GO) -> None:
        self.order("release", gate, verb)

    def wait(self, *words: Any, since: int = 0, timeout: float = PATIENCE) -> tuple[Any, ...]:
        """The first thing said from place `since` on that begins with `words`; a callable stands for a test of it."""
        deadline = time.monotonic() + timeout
        with self._heard:
            while True:
                for said in self.said[since:]:
                    if len(said) >= len(words) and all(map(_fits, words, said)):
                        return said
                since = max(since, len(self.said))
                if not self._heard.wait(deadline - time.monotonic()):
                    raise AssertionError(f"{self.name} did not say {words} within {timeout:g} s\n{self.story()}")

    def story(self, last: int = 40) -> str:
        return "\n".join(f"  {self.name}: {' '.join(map(str, said))[:300]}" for said in self.said[-last:])

    def kill(self) -> None:
        """SIGKILL, also of a stopped process; returns when it is gone."""
        self._process.kill()
        self._process.join()
        self._listener.join()
        self._line.close()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                words = self._line.recv()
                with self._heard:
                    self.said.append(words)
                    self._heard.notify_all()


def _fits(expected: Any, said: Any) -> bool:
    return bool(expected(said)) if callable(expected) else bool(expected == said)


def _run(line: Connection, main: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.INFO)
    gates = Gates(line)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # torch's C++ side tells every lost connection at length
    try:
        main(gates, *args)
    except BaseException:
        gates.say("crashed", traceback.format_exc())


def _go_through(proxy: str) -> None:
    if proxy:
        transport._OPTIONS[zmq.SOCKS_PROXY] = proxy.encode()  # type: ignore[assignment]


# -------------------------------------------------------------------------------------- controller


def start_controller(journal: str, bind: str = "tcp://127.0.0.1:0", timeouts: Timeouts = SHORT) -> Process:
    """It says each event that it journals, and has a gate behind each: `VersionCommitted`, `NodeReady node-1`."""
    return Process("controller", _controller, journal, bind, timeouts)


def _controller(gates: Gates, journal: str, bind: str, timeouts: Timeouts) -> None:
    class WatchedJournal(SqliteJournal):
        def append(self, run: str, event: Event, time: float, previous: int = 0) -> bytes:
            frame = super().append(run, event, time, previous)
            peer = getattr(event, "peer", None)
            gates.say("journaled", type(event).__name__, peer.node if peer else "", event)
            gates.block(f"{type(event).__name__} {peer.node}" if peer else type(event).__name__)
            return frame

    async def run() -> None:
        async with Controller.open(bind, journal=journal, timeouts=timeouts) as controller:
            gates.say("open", controller.address)
            await anyio.sleep_forever()

    with patch("bus.controller.SqliteJournal", WatchedJournal):
        anyio.run(run)


# ------------------------------------------------------------------------------------ rollout node


def start_node(node: str, address: str, *, hold: str = "", proxy: str = "") -> Process:
    """It says `active`, version and digest of what it serves from now on; its gates are the engine's steps.

    It starts with gate `hold` held. With `proxy`, a SOCKS5 address, its control traffic goes that way.
    """
    return Process(node, _node, node, address, hold, proxy)


class GatedEngine(LightEngine):
    """A light engine with a gate before each step; it tells what it serves."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self._gates = gates
        failures: dict[str, Exception] = {
            "join_view": RuntimeError("told to fail"),
            "prepare": Refused(Reason.NO_FREE_SLOT, "told to refuse"),
            "receive": TransferFailed(0, "told to fail"),
            "load": LoadFailed(Reason.ENGINE_FAILED, "told to fail"),
            "activate": RuntimeError("told to fail"),
        }
        self.before = {step: partial(gates.pass_through, step, failure) for step, failure in failures.items()}

    async def activate(self, attempt: Attempt) -> None:
        await super().activate(attempt)
        self._gates.say("active", attempt.version, self.versions[attempt.adapter, attempt.version].decode())


def _node(gates: Gates, node: str, address: str, hold: str, proxy: str) -> None:
    gates.hold(hold)
    _go_through(proxy)

    async def run() -> None:
        engine = GatedEngine(gates)
        await follow(engine, address=address, node=node, timeouts=SHORT)

    anyio.run(run)


# ----------------------------------------------------------------------------------------- trainer


def start_trainer(address: str, *, proxy: str = "") -> Process:
    """On the order `publish value [timeout]` it says `committed` or `failed`; gates: `join_view`, `transmit`."""
    return Process("trainer", _trainer, address, proxy)


def adapter(value: float) -> ExportedAdapter:
    shape = layout()
    return ExportedAdapter(shape, {spec.name: torch.full(spec.shape, value) for spec in shape.tensors})


def _trainer(gates: Gates, address: str, proxy: str) -> None:
    _go_through(proxy)

    class GatedSession(Session):
        async def _join_view(self, proposal: ViewProposed) -> None:
            await gates.pass_through("join_view")
            await super()._join_view(proposal)

        async def _transmit(self, effect: Transmit) -> None:
            await gates.pass_through("transmit")
            await super()._transmit(effect)

    opening = AdapterPublisher.blocking(ADAPTER, address=address, timeouts=SHORT)
    with patch("trainer_node.publisher.Session", GatedSession), opening as publisher:

        def publish(value: float, timeout: float | None = None) -> None:
            try:
                update = publisher.publish(adapter(value), timeout=timeout)
            except UpdateFailed as error:
                facts = {key: getattr(error, key) for key in ("version", "node", "phase", "reason", "detail")}
                gates.say("failed", value, facts)
            else:
                gates.say("committed", value, update)

        gates.orders = {
            "publish": lambda *order: threading.Thread(target=publish, args=order, daemon=True).start(),
            "wait_for_nodes": lambda count: gates.say("nodes", len(publisher.wait_for_nodes(count, PATIENCE))),
        }
        gates.say("open")
        threading.Event().wait()
