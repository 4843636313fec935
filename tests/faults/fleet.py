"""A controller, a trainer and rollout nodes as processes, with one journal: what a row of the matrix strikes at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from bus.events import Outcome, UpdateAnnounced, VersionCommitted
from bus.journal import SqliteJournal
from tests.faults.processes import Process, start_controller, start_node, start_trainer
from tests.faults.proxy import Proxy


class Fleet:
    """Opened with `Fleet.open`; all its processes are killed when the block is left. `nodes` are the live ones."""

    def __init__(self, journal: Path, proxy: Proxy) -> None:
        self.journal = str(journal)
        self.proxy = proxy
        self.nodes: dict[str, Process] = {}
        self.started: list[Process] = []
        self.controller = self._start(start_controller(self.journal))
        self.address = str(self.controller.wait("open")[1])
        self.trainer: Process

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        with ExitStack() as stack:
            fleet = cls(folder / "journal.db", stack.enter_context(Proxy.open()))
            stack.callback(fleet._kill_all)
            yield fleet

    def _kill_all(self) -> None:
        for process in self.started:
            process.kill()

    def _start(self, process: Process) -> Process:
        self.started.append(process)
        return process

    def process(self, name: str) -> Process:
        return {"controller": self.controller, "trainer": self.trainer, **self.nodes}[name]

    def restart(self, name: str) -> None:
        """Start a killed process again: the controller on its address and journal, a peer under its name."""
        match name:
            case "controller":
                self.controller = self._start(start_controller(self.journal, self.address))
                self.controller.wait("open")
            case "trainer":
                self.start_trainer()
            case _:
                self.start_node(name)

    def start_trainer(self, *, proxied: bool = False) -> Process:
        """A trainer that has joined, in the place of the one there was."""
        self.trainer = self._start(start_trainer(self.address, proxy=self.proxy.address if proxied else ""))
        self.trainer.wait(lambda word: word in ("open", "crashed"))
        return self.trainer

    def start_node(self, name: str, *, hold: str = "", proxied: bool = False) -> Process:
        proxy = self.proxy.address if proxied else ""
        self.nodes[name] = self._start(start_node(name, self.address, hold=hold, proxy=proxy))
        return self.nodes[name]

    def publish(self, value: float) -> tuple[Any, ...]:
        """What publishing this content came to: `committed`, the value and the `Update`, or `failed` and the facts."""
        self.trainer.order("publish", value)
        return self.outcome(value)

    def outcome(self, value: float) -> tuple[Any, ...]:
        return self.trainer.wait(lambda word: word in ("committed", "failed"), value)

    def head(self) -> tuple[int, str]:
        """Version and digest of the newest commit in the journal."""
        return self.committed()[-1]

    def committed(self) -> list[tuple[int, str]]:
        with SqliteJournal(self.journal) as journal:
            events = [entry.event for entry in journal.entries()]
        return [(event.attempt.version, event.digest) for event in events if isinstance(event, VersionCommitted)]

    def wait_consistent(self, *names: str) -> None:
        """Wait until these nodes (none: all) serve the head."""
        head = self.head()
        for name in names or tuple(self.nodes):
            self.nodes[name].wait("active", *head)

    def check_history(self) -> None:
        """No number twice, no gap in the journal, and no process that ever served anything but commits, in order."""
        with SqliteJournal(self.journal) as journal:
            entries = list(journal.entries())
        assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
        committed = self.committed()
        versions = [version for version, _ in committed]
        assert versions == sorted(set(versions)), "a number was committed twice, or out of order"
        contents: dict[int, str] = {}
        for entry in entries:
            if isinstance(event := entry.event, UpdateAnnounced):
                digest = contents.setdefault(event.attempt.version, event.manifest.digest)
                assert digest == event.manifest.digest, f"number {event.attempt.version} was given to two contents"
        for process in self.started:
            served = [said[1:3] for said in process.said if said[0] == "active"]
            assert set(served) <= set(committed), f"{process.name} served what was never committed: {served}"
            assert served == sorted(served), f"{process.name} went back: {served}"

    def check_everyone_follows(self, value: float) -> None:
        """The next publish works, and every node of the fleet is in it."""
        self.trainer.order("wait_for_nodes", len(self.nodes))
        self.trainer.wait("nodes")
        word, _, update = self.publish(value)
        assert word == "committed", f"{update}\n{self.story()}"
        outcomes = {node.node: node.outcome for node in update.nodes}
        assert outcomes == dict.fromkeys(sorted(self.nodes), Outcome.ACTIVATED), self.story()
        assert self.head() == (update.version, update.digest)
        self.wait_consistent()

    def story(self) -> str:
        return "\n".join(process.story() for process in self.started)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started
