"""Which versions a node holds, which slot-taking states they are in, and which one goes next: pure bookkeeping.

A version takes a slot from the moment it is reserved until it is removed. Between, it is served under its own
name (`policy@12`); the newest of an adapter is its head, which requests for the bare name get. A version that is
no longer served drains: the requests that have it go on, and when the last has ended, it can be removed. One that
the engine will not let go of is stuck: its slot is lost until the server restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from bus.events import Attempt


class Stage(Enum):
    """Where a version is on its way through a node."""

    RESERVED = auto()
    SERVED = auto()
    DRAINING = auto()
    UNUSED = auto()
    STUCK = auto()


@dataclass(slots=True)
class Resident:
    """A version that takes a slot, under the number that the engine knows it by."""

    attempt: Attempt
    lora_id: int
    stage: Stage = Stage.RESERVED

    @property
    def name(self) -> str:
        return str(self.attempt)


class VersionTable:
    """The versions of every adapter on one node, in the order in which they took their slots."""

    def __init__(self, slots: int, retain: int | None = None) -> None:
        """`slots` bounds all versions together; `retain`, if given, the served versions of each adapter."""
        self.slots = slots
        self.retain = retain
        self._residents: dict[Attempt, Resident] = {}

    def find(self, attempt: Attempt) -> Resident | None:
        return self._residents.get(attempt)

    @property
    def free(self) -> int:
        return self.slots - len(self._residents)

    @property
    def leaving(self) -> int:
        """Slots that come free once the last requests of their versions have ended."""
        return sum(resident.stage in (Stage.DRAINING, Stage.UNUSED) for resident in self._residents.values())

    def reserve(self, attempt: Attempt, lora_id: int) -> Resident:
        """Take a free slot; the caller has made sure that there is one."""
        self._residents[attempt] = Resident(attempt, lora_id)
        return self._residents[attempt]

    def head(self, adapter: str) -> Resident | None:
        """The newest served version of an adapter."""
        return max(self._served(adapter), key=_age, default=None)

    def is_served(self, name: str) -> bool:
        """Whether requests may ask for this version; it may be here twice."""
        return any(one.stage is Stage.SERVED and one.name == name for one in self._residents.values())

    def surplus(self) -> list[Resident]:
        """Served versions that retention gives up now: beyond `retain`, or so that one slot is free next time."""
        old = self._replaceable()
        if self.retain is not None and (beyond := [one for one in old if self._newer(one) >= self.retain]):
            return beyond
        return old[:1] if self.free + self.leaving < 1 else []

    def oldest_replaceable(self) -> Resident | None:
        """The served version that goes next when a slot is needed; never a head."""
        return next(iter(self._replaceable()), None)

    def unused(self) -> list[Resident]:
        """Versions whose last request has ended."""
        return [resident for resident in self._residents.values() if resident.stage is Stage.UNUSED]

    def remove(self, resident: Resident) -> None:
        """Free the slot; no error if it is free."""
        self._residents.pop(resident.attempt, None)

    def _served(self, adapter: str) -> list[Resident]:
        return [
            resident
            for resident in self._residents.values()
            if resident.stage is Stage.SERVED and resident.attempt.adapter == adapter
        ]

    def _newer(self, resident: Resident) -> int:
        return sum(_age(other) > _age(resident) for other in self._served(resident.attempt.adapter))

    def _replaceable(self) -> list[Resident]:
        return [
            resident
            for resident in self._residents.values()
            if resident.stage is Stage.SERVED and self._newer(resident)
        ]


def _age(resident: Resident) -> tuple[int, int]:
    """Which of two is newer: one version may come twice, when a node was thought to lack it."""
    return resident.attempt.version, resident.attempt.number
