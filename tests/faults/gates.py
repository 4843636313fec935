"""The line between a test and one process under test: what it says, and where it is to stop.

The process passes named gates; one that the test holds says so and waits until it is let go, told to fail, or killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

GO, FAIL = "go", "fail"


class Gates:
    """The process's end of the line. `say` and `at` may be called from any thread; the test's orders come in on one.

    `orders` are what the test may ask beside holding gates, by name; they run on the thread that hears orders.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._saying = threading.Lock()
        self._held: dict[str, Future[str]] = {}
        self._waiting: dict[str, Future[str]] = {}
        self.orders: Mapping[str, Callable[..., Any]] = {}
        threading.Thread(target=self._hear, name="gates", daemon=True).start()
        logging.getLogger().addHandler(_Told(self))

    def say(self, *words: Any) -> None:
        with self._saying:
            self._line.send(words)

    def hold(self, gate: str) -> None:
        """Wait at this gate the next time."""
        self._held[gate] = Future()

    async def pass_through(self, gate: str, failure: Exception | None = None) -> None:
        """Go on at once, or wait here for as long as the test holds this gate; raises `failure` if told to."""
        released = self._at(gate)
        if released is not None and await asyncio.wrap_future(released) == FAIL and failure is not None:
            raise failure

    def block(self, gate: str) -> None:
        """The same where nothing may be awaited: the whole event loop stands still."""
        if (released := self._at(gate)) is not None:
            released.result()

    def _at(self, gate: str) -> Future[str] | None:
        released = self._held.pop(gate, None)
        if released is not None:
            self._waiting[gate] = released
            self.say("at", gate)
        return released

    def _hear(self) -> None:
        while True:
            try:
                order, *words = self._line.recv()
            except (EOFError, OSError):
                os._exit(1)  # the test is gone
            match order, words:
                case "hold", [gate]:
                    self.hold(gate)
                    self.say("held", gate)
                case "release", [gate, verb]:
                    released = self._waiting.pop(gate)
                    if released.set_running_or_notify_cancel():
                        released.set_result(verb)
                case _:
                    self.orders[order](*words)


class _Told(logging.Handler):
    """What the process logs goes to the test: a row that fails can tell its story."""

    def __init__(self, gates: Gates) -> None:
        super().__init__(logging.INFO)
        self._gates = gates

    def emit(self, record: logging.LogRecord) -> None:
        self._gates.say("log", f"{record.levelname} {record.name}: {self.format(record)}")
