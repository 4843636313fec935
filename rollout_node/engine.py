"""vLLM as the bus sees it: one API server and all its workers, as one `Engine`.

Bytes travel and adapters are built in the workers' own threads, asked over a private line; only filling and
emptying a slot goes through the engine. All workers do a thing, or the node has not done it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from bus.base_model import base_model_at
from bus.capabilities import check_servable
from bus.engine import Engine, Loaded, Received
from bus.errors import EngineUnsupported, LoadFailed, Refused, RendezvousFailed, TransferFailed
from bus.events import Attempt, NodeCapabilities, Reason, TransferStarted, UpdateAnnounced, ViewProposed
from bus.manifest import AdapterLayout, AdapterManifest
from rollout_node import ENGINE, WORKER_EXTENSION, engine_version
from rollout_node.commands import Build, BytesHeld, Discard, JoinGroup, LeaveGroup, Prepare, Receive, Verify
from rollout_node.versions import Resident, Stage, VersionTable
from rollout_node.vllm_seam import ServedModels
from rollout_node.worker_line import WorkerLine

log = logging.getLogger(__name__)

_ATTACH_SECONDS: Final = 30.0
_DISCARD_SECONDS: Final = 10.0

_REMOVE_SECONDS: Final = 5.0
"""How long the engine may take to empty a slot; new versions must not wait longer for an old one."""

_READY_SHARE: Final = 0.8
"""The part of the ready timeout spent waiting for a slot; the rest is for saying that none came free."""

_DRAIN_SECONDS: Final = 0.25
"""How long a draining version is waited for, when a slot is needed, before the next oldest must go too."""

_RELEASE_SECONDS: Final = 1.0
"""How often versions that drain are looked at for requests whose clients hung up."""


class VllmEngine(Engine):
    """The engine of one vLLM server; made by `open`."""

    def __init__(
        self, served: ServedModels, line: WorkerLine, capabilities: NodeCapabilities, retain: int | None
    ) -> None:
        self._served = served
        self._line = line
        self._capabilities = capabilities
        self._versions = VersionTable(served.slots, retain)
        self._views: dict[int, ViewProposed] = {}
        self._unused = anyio.Event()
        self._removing = anyio.Lock()
        self._retired: list[tuple[str, int]] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, served: ServedModels, *, host: str, endpoint: str = "", retain: int | None = None
    ) -> AsyncIterator[Self]:
        """An engine with a listening thread in every worker.

        `host` is the interface that groups are formed on, `endpoint` the server's URL as `status` shows it, and
        `retain` how many versions of an adapter stay addressable (default: as many as leave one slot free).
        Raises `EngineUnsupported`, also for a server started without the worker extension. Leaving the block
        changes nothing of what is served: the server goes on without the bus.
        """
        base_model = await anyio.to_thread.run_sync(base_model_at, served.model)
        async with WorkerLine.open(served.workers) as line:
            first, *_ = await _attach(served, line, host)
            capabilities = NodeCapabilities(
                base_model=base_model,
                max_rank=served.max_rank,
                slots=served.slots,
                modules=tuple(first["modules"]),
                dtype=first["dtype"],
                workers=served.workers,
                device=first["device"],
                engine=ENGINE,
                engine_version=engine_version(),
                endpoint=endpoint,
            )
            yield cls(served, line, capabilities, retain)

    @property
    def capabilities(self) -> NodeCapabilities:
        return self._capabilities

    # ---------------------------------------------------------------------------------------- groups

    async def join_view(self, proposal: ViewProposed, node: str) -> None:
        ranks, workers = proposal.ranks(node), self._served.workers
        if len(ranks) != workers:
            raise RendezvousFailed(proposal.view, (), proposal.timeout, f"{len(ranks)} ranks for {workers} workers")
        self._views[proposal.view] = proposal
        await self._line.ask(JoinGroup(proposal.view, ranks, len(proposal.members), proposal.store, proposal.timeout))

    async def leave_view(self, view: int) -> None:
        self._views.pop(view, None)
        await self._line.ask(LeaveGroup(view))

    # --------------------------------------------------------------------------------------- updates

    async def prepare(self, update: UpdateAnnounced, layout: AdapterLayout) -> None:
        attempt, manifest = update.attempt, update.manifest
        deadline = time.monotonic() + _READY_SHARE * update.timeout
        check_servable(layout, self._capabilities)
        if self._served.is_taken(attempt.adapter):
            raise Refused(Reason.NAME_TAKEN, f"this server already serves a model named {attempt.adapter}")
        if (
            AdapterManifest.of(layout, manifest.digest, chunk_bytes=manifest.chunk_bytes, step=manifest.step)
            != manifest
        ):
            raise Refused(Reason.UNSUPPORTED_ADAPTER, f"the manifest of {attempt} does not describe its layout")
        try:
            await self._line.ask(Prepare(attempt, layout.body, manifest))
            await self._take_slot(attempt, deadline)
        except BaseException:
            with anyio.move_on_after(_DISCARD_SECONDS, shield=True):
                await self.discard(attempt)
            raise

    async def receive(self, started: TransferStarted) -> Received:
        attempt, begun = started.attempt, time.monotonic()
        if attempt.view not in self._views or self._versions.find(attempt) is None:
            raise TransferFailed(attempt.view, f"{attempt} was not prepared in this view")
        members = enumerate(self._views[attempt.view].members)
        ranks = tuple(rank for rank, member in members if member.node in started.audience)
        answers = await self._line.ask(Receive(attempt, ranks, started.timeout))
        held = {answer.digest: answer.worker for answer in answers if isinstance(answer, BytesHeld)}
        if len(held) > 1:
            shown = ", ".join(f"worker {worker} holds {digest}" for digest, worker in held.items())
            raise TransferFailed(attempt.view, f"the workers received different bytes: {shown}")
        (digest,) = held
        return Received(digest, time.monotonic() - begun)

    async def load(self, attempt: Attempt) -> Loaded:
        started = time.monotonic()
        resident = self._resident(attempt)
        await self._line.ask(Build(attempt, resident.lora_id))
        proofs = await self._served.call_workers(
            "adapterbus_fill", attempt.adapter, attempt.version, attempt.number, attempt.view
        )
        for worker, proof in enumerate(proofs):
            if "error" in proof:
                raise LoadFailed(proof["reason"], f"{self._line.whose(worker)}{proof['error']}")
        await self._line.ask(Verify(attempt))
        return Loaded(
            proofs[0]["digest"],  # each worker compared its own with the manifest's before it built anything
            min(proof["matched"] for proof in proofs),
            max(proof["total"] for proof in proofs),
            time.monotonic() - started,
        )

    async def activate(self, attempt: Attempt) -> None:
        resident = self._resident(attempt)
        if resident.stage is not Stage.RESERVED:
            return
        resident.stage = Stage.SERVED
        path = f"adapterbus://{attempt.adapter}/{attempt.version}"
        request = self._served.watched_request(resident.name, resident.lora_id, path, self._notice_unused(resident))
        self._served.serve(resident.name, request)
        if self._versions.head(attempt.adapter) is resident:
            self._served.serve(attempt.adapter, request)
        for old in self._versions.surplus():
            self._drain(old)

    async def discard(self, attempt: Attempt) -> None:
        await self._line.ask(Discard(attempt))
        resident = self._versions.find(attempt)
        if resident is not None and resident.stage is Stage.RESERVED:
            # Calls reach the engine in the order they were made, so this also undoes a fill that nobody waits for.
            await self._served.call_workers("adapterbus_remove", resident.lora_id)
            self._versions.remove(resident)

    async def wait_retired(self) -> tuple[str, int]:
        while not self._retired:
            with anyio.move_on_after(_RELEASE_SECONDS):
                await self._unused.wait()
            await self._release_abandoned()
            await self._remove_unused()
        return self._retired.pop(0)

    # ----------------------------------------------------------------------------------------- slots

    async def _take_slot(self, attempt: Attempt, deadline: float) -> None:
        """Reserve a slot, and retire old versions for it, oldest first; raises `Refused` at the deadline."""
        impatient = False
        while self._versions.free < 1:
            oldest = self._versions.oldest_replaceable()
            left = deadline - time.monotonic()
            if left <= 0 or (oldest is None and not self._versions.leaving):
                raise Refused(
                    Reason.NO_FREE_SLOT,
                    f"all {self._versions.slots} LoRA slots are taken, {self._versions.leaving} by old versions that "
                    f"still answer requests; start the server with a higher --max-loras",
                )
            if oldest is not None and (impatient or not self._versions.leaving):
                self._drain(oldest)
            with anyio.move_on_after(min(left, _DRAIN_SECONDS)):
                await self._unused.wait()
            await self._release_abandoned()
            impatient = not self._unused.is_set()
            await self._remove_unused()
        self._versions.reserve(attempt, self._served.next_lora_id())

    def _resident(self, attempt: Attempt) -> Resident:
        resident = self._versions.find(attempt)
        if resident is None:
            raise LoadFailed(Reason.ENGINE_FAILED, f"{attempt} has no slot on this node")
        return resident

    def _drain(self, resident: Resident) -> None:
        resident.stage = Stage.DRAINING
        if not self._versions.is_served(resident.name):
            self._served.stop_serving(resident.name)

    def _notice_unused(self, resident: Resident) -> Callable[[], None]:
        """What to call, from any thread, when the last request that carried a version is gone."""
        loop = asyncio.get_running_loop()

        def mark() -> None:
            resident.stage = Stage.UNUSED
            self._unused.set()

        def notice() -> None:
            with suppress(RuntimeError):  # the server is shutting down, its loop is closed
                loop.call_soon_threadsafe(mark)

        return notice

    async def _release_abandoned(self) -> None:
        """Notice the versions that drain only because a client hung up."""
        if self._versions.leaving and not self._unused.is_set():
            self._served.release_abandoned()
            await anyio.lowlevel.checkpoint()  # what was let go is marked by a callback of the event loop

    async def _remove_unused(self) -> None:
        async with self._removing:
            for resident in self._versions.unused():
                with anyio.move_on_after(_REMOVE_SECONDS) as patience:
                    await self._served.call_workers("adapterbus_remove", resident.lora_id)
                if patience.cancelled_caught:
                    resident.stage = Stage.STUCK
                    log.error("%s was not removed within %g s: its slot is lost", resident.name, _REMOVE_SECONDS)
                    continue
                self._versions.remove(resident)
                self._retired.append((resident.attempt.adapter, resident.attempt.version))
            if not self._versions.unused():
                self._unused = anyio.Event()


async def _attach(served: ServedModels, line: WorkerLine, host: str) -> list[dict[str, Any]]:
    """Start the thread in every worker, and wait until all have connected; what each of them can serve."""
    try:
        described = await served.call_workers("adapterbus_attach", line.address, host)
    except Exception as error:  # vLLM hands back whatever went wrong in a worker as a bare Exception
        raise EngineUnsupported(
            ENGINE,
            engine_version(),
            f"its workers do not know our calls ({error}); start it with `adapterbus serve`, "
            f"or with --worker-extension-cls {WORKER_EXTENSION}",
        ) from error
    for worker, description in enumerate(described):
        if "error" in description:
            raise EngineUnsupported(ENGINE, engine_version(), f"{line.whose(worker)}{description['error']}")
    with anyio.move_on_after(_ATTACH_SECONDS) as waiting:
        await line.wait_attached()
    if waiting.cancelled_caught:
        raise EngineUnsupported(
            ENGINE, engine_version(), f"its workers did not connect to {line.address} within {_ATTACH_SECONDS:g} s"
        )
    return described
