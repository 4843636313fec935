"""What the bus asks of an inference engine; `rollout_node` answers for vLLM, tests with a light fake.

Every method is called by one participant, one update at a time per adapter, and may take as long as it needs:
deadlines are the caller's. Cancelling any of them leaves the engine as it was before, or with staged bytes
that `discard` frees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from bus.events import Attempt, NodeCapabilities, TransferStarted, UpdateAnnounced, ViewProposed
from bus.manifest import AdapterLayout


@dataclass(frozen=True, slots=True)
class Received:
    """All workers hold the bytes: their digest, and the seconds from start to last byte hashed."""

    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The adapter sits in its slot on all workers: `matched` of `total` tensors found their module."""

    digest: str
    matched: int
    total: int
    seconds: float


class Engine(ABC):
    """One inference engine with all its workers."""

    @property
    @abstractmethod
    def capabilities(self) -> NodeCapabilities:
        """What this engine can serve; fixed for its life."""

    @abstractmethod
    async def join_view(self, proposal: ViewProposed, node: str) -> None:
        """Have every worker enter the group under its rank; raises `RendezvousFailed`."""

    @abstractmethod
    async def leave_view(self, view: int) -> None:
        """Drop the group on every worker; no error if there is none."""

    @abstractmethod
    async def prepare(self, update: UpdateAnnounced, layout: AdapterLayout) -> None:
        """Check the manifest against what can be served, find a slot, allocate; raises `Refused`."""

    @abstractmethod
    async def receive(self, started: TransferStarted) -> Received:
        """Take the bytes from the collective into staging, and hash them; raises `TransferFailed`.

        The audience of the transfer is `started.audience`; it may be smaller than what was announced.
        """

    @abstractmethod
    async def load(self, attempt: Attempt) -> Loaded:
        """Build the adapter from the staged bytes and fill its slot; raises `LoadFailed`."""

    @abstractmethod
    async def activate(self, attempt: Attempt) -> None:
        """New requests for the adapter's name use this version from now on."""

    @abstractmethod
    async def discard(self, attempt: Attempt) -> None:
        """Forget whatever was prepared, staged or loaded for an attempt that will not be committed."""

    @abstractmethod
    async def wait_retired(self) -> tuple[str, int]:
        """Wait until an old version was removed, and say which: (adapter, version)."""
