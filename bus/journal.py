"""The event journal: one SQLite file that any SQLite client can open.

    events(sequence, time, kind, adapter, version, view, node, body)

`body` is the frame that went over the wire, `time` seconds since the epoch. What is published was journaled
first. A crash of the process loses nothing that `append` returned for; a power cut may lose the last moments
(write-ahead log, `synchronous=NORMAL`), never the file. Not safe to share between threads.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bus.codec import EVENT_CODEC
from bus.errors import CodecError, JournalError
from bus.events import Envelope, Event

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    sequence INTEGER PRIMARY KEY,
    time     REAL NOT NULL,
    kind     TEXT NOT NULL,
    adapter  TEXT,
    version  INTEGER,
    view     INTEGER,
    node     TEXT,
    body     BLOB NOT NULL
)
"""
_INSERT = "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One row: its place, when it was written (seconds since the epoch), and the event."""

    sequence: int
    time: float
    event: Event


class Journal(ABC):
    """An append-only list of events, numbered from 1 without a gap."""

    @property
    @abstractmethod
    def sequence(self) -> int:
        """The number of the newest entry; 0 while there is none."""

    @abstractmethod
    def append(self, run: str, event: Event, time: float, previous: int = 0) -> bytes:
        """Write an event as the next entry, and return its frame; raises `JournalError`, and then nothing is written.

        `previous` is the sequence of the event published before it, as the frame states it.
        """

    @abstractmethod
    def entries(self) -> Iterator[JournalEntry]:
        """Every entry, oldest first; raises `JournalError` at the first that cannot be read, naming its sequence."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class SqliteJournal(Journal):
    """A journal in a SQLite file, made if it is not there; `:memory:` keeps it in memory."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        try:
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=1.0)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(_SCHEMA)
            (self._sequence,) = self._connection.execute("SELECT COALESCE(MAX(sequence), 0) FROM events").fetchone()
        except sqlite3.Error as error:
            raise JournalError(
                self.path, f"cannot be opened ({error}); is it a journal, and its folder writable?"
            ) from None

    @property
    def sequence(self) -> int:
        return int(self._sequence)

    def append(self, run: str, event: Event, time: float, previous: int = 0) -> bytes:
        sequence = self._sequence + 1
        frame = EVENT_CODEC.encode(Envelope(run, sequence, event, previous))
        row = (sequence, time, type(event).__name__, *_columns(event), frame)
        try:
            self._connection.execute(_INSERT, row)
        except sqlite3.Error as error:
            raise JournalError(self.path, f"entry {sequence} was not written ({error})") from None
        self._sequence = sequence
        return frame

    def entries(self) -> Iterator[JournalEntry]:
        rows = self._connection.execute("SELECT sequence, time, body FROM events ORDER BY sequence")
        while True:
            try:
                row = rows.fetchone()
            except sqlite3.Error as error:
                raise JournalError(self.path, f"is damaged ({error})") from None
            if row is None:
                return
            sequence, time, body = row
            try:
                yield JournalEntry(sequence, time, EVENT_CODEC.decode(body).event)
            except CodecError as error:
                raise JournalError(self.path, f"entry {sequence} is damaged ({error})") from None

    def close(self) -> None:
        self._connection.close()


def _columns(event: Any) -> tuple[str | None, int | None, int | None, str | None]:
    """What an event says of adapter, version, view and node, for people who query the file."""
    attempt = getattr(event, "attempt", None)
    peer = getattr(event, "peer", None)
    return (
        attempt.adapter if attempt else getattr(event, "adapter", None),
        attempt.version if attempt else getattr(event, "version", None),
        attempt.view if attempt else getattr(event, "view", None),
        peer.node if peer else getattr(event, "node", None),
    )
