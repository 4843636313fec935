"""An inference engine, modelled around the real table of versions: slots, an alias for each adapter, requests.

A request takes its version when it is admitted and holds it until it ends; a version leaves its slot when its
last request has ended. Bytes are their own digest, as in `collective.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.capabilities import check_servable
from bus.engine import Loaded
from bus.errors import LoadFailed, Refused
from bus.events import Attempt, NodeCapabilities, Reason, UpdateAnnounced
from bus.manifest import AdapterLayout
from rollout_node.versions import Resident, Stage, VersionTable
from tools.simulation.world import Waiting

if TYPE_CHECKING:
    from tools.simulation.faults import Plan

DRAIN_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Staged:
    """What an attempt was announced with, and the bytes received for it so far."""

    update: UpdateAnnounced
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request under way: the version that its response will name, and the bytes that stood for it when admitted."""

    resident: Resident
    content: str


class ModelledEngine:
    """One inference server; `retired` is called with each (adapter, version) that left its slot."""

    def __init__(
        self, capabilities: NodeCapabilities, name: str, plan: Plan, retired: Callable[[str, int], None]
    ) -> None:
        self.capabilities = capabilities
        self.alias: dict[str, Resident] = {}
        """What requests for each adapter's bare name get."""
        self.contents: dict[int, str] = {}
        """The bytes in each slot, by the number that the engine knows a version by."""
        self._name = name
        self._plan = plan
        self._retired = retired
        self._versions = VersionTable(capabilities.slots)
        self._staged: dict[Attempt, Staged] = {}
        self._requests: Counter[int] = Counter()
        self._last_id = 0

    # --------------------------------------------------------------------------------------- updates

    def prepare(self, update: UpdateAnnounced, layout: AdapterLayout) -> Generator[float | Waiting, None, None]:
        yield from self._work("prepare", "preparing")
        check_servable(layout, self.capabilities)
        self._staged[update.attempt] = Staged(update)
        while self._versions.free < 1:
            oldest = self._versions.oldest_replaceable()
            if oldest is None and not self._versions.leaving:
                raise Refused(Reason.NO_FREE_SLOT, "all slots are taken")
            if oldest is not None and not self._versions.leaving:
                self._drain(oldest)
            self._remove_unused()
            if self._versions.free < 1:
                yield DRAIN_LOOK_SECONDS
        self._last_id += 1
        self._versions.reserve(update.attempt, self._last_id)

    def stage(self, attempt: Attempt, content: str) -> None:
        self._staged[attempt].content = content

    def load(self, attempt: Attempt) -> Generator[float | Waiting, None, Loaded]:
        yield from self._work("load", "loading")
        resident, staged = self._versions.find(attempt), self._staged.get(attempt)
        if resident is None or staged is None or staged.content is None:
            raise LoadFailed(Reason.ENGINE_FAILED, f"{attempt} has no slot on this node")
        self.contents[resident.lora_id] = staged.content
        tensors = staged.update.manifest.tensors
        return Loaded(staged.content, tensors, tensors, 0.0)

    def activate(self, attempt: Attempt) -> Generator[float | Waiting, None, None]:
        yield from self._work("activate", "activating")
        resident = self._versions.find(attempt)
        if resident is None:
            raise LoadFailed(Reason.ENGINE_FAILED, f"{attempt} has no slot on this node")
        if resident.stage is Stage.RESERVED:
            self._staged.pop(attempt, None)
            resident.stage = Stage.SERVED
            if self._versions.head(attempt.adapter) is resident:
                self.alias[attempt.adapter] = resident
            for old in self._versions.surplus():
                self._drain(old)
            self._remove_unused()

    def discard(self, attempt: Attempt) -> None:
        self._staged.pop(attempt, None)
        resident = self._versions.find(attempt)
        if resident is not None and resident.stage is Stage.RESERVED:
            self._remove(resident)

    def _work(self, step: str, doing: str) -> Generator[float | Waiting, None, None]:
        """Take the time that a step takes, and fail if it is fated to."""
        fate = self._plan.fate(step, self._name)
        if fate == "hangs":
            yield float("inf")
        yield self._plan.duration("slow" if fate == "is slow" else step)
        if fate == "refuses":
            raise Refused(Reason.ENGINE_FAILED, "injected")
        if fate == "fails":
            raise LoadFailed(Reason.ENGINE_FAILED, f"{doing} failed: injected")

    # -------------------------------------------------------------------------------------- requests

    def admit(self, adapter: str) -> Request | None:
        """Take a request for an adapter's bare name; None while the engine does not know it."""
        resident = self.alias.get(adapter)
        if resident is None:
            return None
        self._requests[resident.lora_id] += 1
        return Request(resident, self.contents[resident.lora_id])

    def answer(self, request: Request) -> str | None:
        """End a request; the bytes that it was answered with, None if they are gone."""
        resident = request.resident
        content = self.contents.get(resident.lora_id)
        self._requests[resident.lora_id] -= 1
        if resident.stage is Stage.DRAINING and not self._requests[resident.lora_id]:
            resident.stage = Stage.UNUSED
            self._remove_unused()
        return content

    def _drain(self, resident: Resident) -> None:
        resident.stage = Stage.DRAINING if self._requests[resident.lora_id] else Stage.UNUSED

    def _remove_unused(self) -> None:
        for resident in self._versions.unused():
            self._remove(resident)
            self._retired(resident.attempt.adapter, resident.attempt.version)

    def _remove(self, resident: Resident) -> None:
        self._versions.remove(resident)
        self.contents.pop(resident.lora_id, None)
