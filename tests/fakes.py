"""Doubles of the boundaries: an engine without a model, on the real collective and the real buffers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from bus.capabilities import check_servable
from bus.collective import AdapterBuffer, Collective
from bus.engine import Engine, Loaded, Received
from bus.events import Attempt, NodeCapabilities, TransferStarted, UpdateAnnounced, ViewProposed
from bus.manifest import AdapterLayout, AdapterManifest, BaseModel, TensorSpec

BASE = BaseModel("tiny", "config:0123456789abcdef")


def capabilities(*, max_rank: int = 16, workers: int = 1, base_model: BaseModel = BASE) -> NodeCapabilities:
    return NodeCapabilities(
        base_model, max_rank, 4, ("q_proj", "v_proj"), "float32", workers, "cpu", "light", "1", "http://127.0.0.1:1"
    )


def layout(rank: int = 4, layers: int = 2, hidden: int = 8) -> AdapterLayout:
    """A small adapter: a pair on q_proj of each layer."""
    tensors = []
    for index in range(layers):
        module = f"base_model.model.model.layers.{index}.self_attn.q_proj"
        tensors.append(TensorSpec(f"{module}.lora_A.weight", "float32", (rank, hidden)))
        tensors.append(TensorSpec(f"{module}.lora_B.weight", "float32", (hidden, rank)))
    return AdapterLayout(BASE, '{"peft_type":"LORA"}', tuple(tensors))


class LightEngine(Engine):
    """Receives for real and loads by keeping the bytes; `before` lets a test hold or fail a step by its name."""

    def __init__(self, offered: NodeCapabilities | None = None) -> None:
        self.versions: dict[tuple[str, int], bytes] = {}
        self.active: dict[str, int] = {}
        self.history: list[tuple[str, int]] = []
        self.activated = anyio.Event()
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self._offered = offered or capabilities()
        self._collectives = [Collective() for _ in range(self._offered.workers)]
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._proposals: dict[int, ViewProposed] = {}
        self._node = ""
        self._prepared: dict[Attempt, tuple[AdapterManifest, list[AdapterBuffer]]] = {}

    @property
    def capabilities(self) -> NodeCapabilities:
        return self._offered

    async def join_view(self, proposal: ViewProposed, node: str) -> None:
        await self._step("join_view")
        self._node = node
        self._proposals[proposal.view] = proposal
        async with _all_workers() as tasks:
            for collective, rank in zip(self._collectives, proposal.ranks(node), strict=True):
                tasks.start_soon(self._join, collective, proposal, rank)

    async def _join(self, collective: Collective, proposal: ViewProposed, rank: int) -> None:
        await collective.join(
            proposal.view, rank=rank, size=len(proposal.members), store=proposal.store, timeout=proposal.timeout
        )

    async def leave_view(self, view: int) -> None:
        for collective in self._collectives:
            await collective.leave(view)

    async def prepare(self, update: UpdateAnnounced, layout: AdapterLayout) -> None:
        await self._step("prepare")
        check_servable(layout, self._offered)
        buffers = [AdapterBuffer(layout.nbytes) for _ in self._collectives]
        self._prepared[update.attempt] = (update.manifest, buffers)

    async def receive(self, started: TransferStarted) -> Received:
        await self._step("receive")
        attempt = started.attempt
        manifest, buffers = self._prepared[attempt]
        proposal = self._proposals[attempt.view]
        ranks = [rank for node in started.audience for rank in proposal.ranks(node)]
        digests: list[str] = []

        async def one(collective: Collective, buffer: AdapterBuffer) -> None:
            digests.append(
                await collective.transfer(attempt.view, buffer, manifest, audience=ranks, timeout=started.timeout)
            )

        begun = anyio.current_time()
        async with _all_workers() as tasks:
            for collective, buffer in zip(self._collectives, buffers, strict=True):
                tasks.start_soon(one, collective, buffer)
        return Received(digests[0], anyio.current_time() - begun)

    async def load(self, attempt: Attempt) -> Loaded:
        await self._step("load")
        manifest, buffers = self._prepared[attempt]
        digest = buffers[0].digest(manifest.nbytes)
        self.versions[attempt.adapter, attempt.version] = digest.encode()
        return Loaded(digest, manifest.tensors, manifest.tensors, 0.0)

    async def activate(self, attempt: Attempt) -> None:
        await self._step("activate")
        self.active[attempt.adapter] = attempt.version
        self.history.append((attempt.adapter, attempt.version))
        self.activated.set()
        self._prepared.pop(attempt, None)

    async def discard(self, attempt: Attempt) -> None:
        self._prepared.pop(attempt, None)
        if self.active.get(attempt.adapter) != attempt.version:
            self.versions.pop((attempt.adapter, attempt.version), None)

    async def wait_retired(self) -> tuple[str, int]:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        for collective in self._collectives:
            await collective.aclose()

    async def _step(self, name: str) -> None:
        if name in self.before:
            await self.before[name]()


@asynccontextmanager
async def _all_workers() -> AsyncIterator[TaskGroup]:
    """Waits for every worker; what the first to fail raised is the engine's own error."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
