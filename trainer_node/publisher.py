"""What a training loop holds: `AdapterPublisher` for async code, `BlockingAdapterPublisher` for ordinary loops.

The bus lives on an event loop of its own, in a thread: a training step of half a minute starves no heartbeat,
and both publishers are the same thing behind two ways of waiting. `publish` copies and hashes the adapter before
it gives control back, so training may go on while the bytes travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import nn

from bus.collective import AdapterBuffer
from bus.controller import DEFAULT_BIND
from bus.errors import InvalidInput
from bus.events import NodeStatus, Policy
from bus.manifest import DEFAULT_CHUNK_BYTES, AdapterManifest
from bus.protocol import Timeouts
from trainer_node.exported import ExportedAdapter
from trainer_node.session import Delivery, Payload, Session, Update

A = TypeVarTuple("A")
T = TypeVar("T")

SPARE_BUFFERS: Final = 2
"""How many buffers are kept for versions to come: one that waits, one that is packed."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """How a publisher meets the bus. Exactly one of `bind` and `address` is given.

    adapter: the name under which servers offer the policy.
    bind: run the controller in this process, listening at this `tcp://host:port` (port 0: the OS picks).
    address: join a controller that runs elsewhere.
    journal: the controller's journal file; in memory by default.
    peft_adapter: PEFT's own name of the adapter, if the model has several.
    node: this trainer's name on the bus.
    device, backend: where the collective runs (`cpu`, `cuda`, …) and over what, by default what fits the device.
    chunk_bytes: the size of the pieces that an adapter is broadcast in.
    policy, quorum: `strict` (a node that says no, or nothing, fails the update) or `quorum` (it is left out and
        stale, as long as `quorum` others confirm; 0 means a majority).
    queue: what a publish does while others wait their turn: `wait` too, or `supersede` those that wait.
    """

    adapter: str
    bind: str | None = None
    address: str | None = None
    journal: Path | str = ":memory:"
    peft_adapter: str | None = None
    node: str | None = None
    device: str = "cpu"
    backend: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    policy: Literal["strict", "quorum"] = "strict"
    quorum: int = 0
    queue: Literal["wait", "supersede"] = "wait"
    timeouts: Timeouts = field(default_factory=Timeouts)
    join_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.adapter or "@" in self.adapter:
            raise InvalidInput(
                f"adapter name {self.adapter!r}: it must not be empty or hold an @, which marks versions"
            )
        if self.bind is not None and self.address is not None:
            raise InvalidInput("give a publisher either bind, to run the controller itself, or address, to join one")


class _Publishing:
    """The part both publishers share: the thread with the bus in it, and the snapshots."""

    def __init__(self, adapter: str, **settings: Any) -> None:
        self.settings = PublisherSettings(adapter, **settings)
        self._stack = ExitStack()
        self._buffers: deque[AdapterBuffer] = deque(maxlen=SPARE_BUFFERS)

    def _start_thread(self) -> None:
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal("asyncio"))
        # Whatever still waits there, a join or a publish that nobody listens to any more, ends with us.
        self._stack.callback(self._portal.call, self._portal.stop, True)

    def _join(self) -> None:
        settings = self.settings
        bind = DEFAULT_BIND if settings.bind is None and settings.address is None else settings.bind
        session = Session.open(
            settings.adapter,
            bind=bind,
            address=settings.address,
            journal=settings.journal,
            node=settings.node,
            device=settings.device,
            backend=settings.backend,
            timeouts=settings.timeouts,
            join_timeout=settings.join_timeout,
            release=self._buffers.append,
        )
        self._session = self._stack.enter_context(self._portal.wrap_async_context_manager(session))

    def _close(self) -> None:
        self._stack.close()

    def _snapshot(self, model: nn.Module | ExportedAdapter, step: int | None) -> Payload:
        """Copy and hash what is to be published; nothing the trainer does later changes it."""
        if isinstance(model, ExportedAdapter):
            exported = model
        else:
            from trainer_node.export import export_adapter  # PEFT is there already if the model is

            exported = export_adapter(model, self.settings.peft_adapter)
        buffer = self._free_buffer(exported.layout.nbytes)
        buffer.pack(exported.layout, exported.tensors)
        digest = buffer.digest(exported.layout.nbytes)
        manifest = AdapterManifest.of(exported.layout, digest, chunk_bytes=self.settings.chunk_bytes, step=step)
        return Payload(exported.layout, manifest, buffer)

    def _free_buffer(self, nbytes: int) -> AdapterBuffer:
        """A buffer that nothing is sent from; those of a layout that is gone are dropped."""
        while self._buffers:
            buffer = self._buffers.popleft()
            if buffer.nbytes == nbytes:
                return buffer
        return AdapterBuffer(nbytes)

    def _delivery(self, timeout: float | None) -> Delivery:
        settings = self.settings
        return Delivery(
            timeout or settings.timeouts.publish,
            Policy(settings.policy),
            settings.quorum,
            settings.queue == "supersede",
        )

    def _start(self, function: Callable[[Unpack[A]], Awaitable[T]], *args: *A) -> Future[T]:
        return self._portal.start_task_soon(function, *args)

    @property
    def address(self) -> str:
        """The controller's address, as nodes are to be given it."""
        return self._session.address

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The live rollout nodes that follow the adapter, as last heard."""
        return self._session.nodes


class AdapterPublisher(_Publishing):
    """Publishes the LoRA adapter of a PEFT model to every server on the bus, from async code.

    Use it as an async context manager; the arguments are those of `PublisherSettings`. Opening it raises
    `AddressInUse`, `ControllerUnreachable`, `JoinFailed` (another live trainer owns the adapter), or `JournalError`.

        async with AdapterPublisher(adapter="policy", bind="tcp://127.0.0.1:5870") as publisher:
            update = await publisher.publish(model)
    """

    @staticmethod
    def blocking(adapter: str, **settings: Any) -> BlockingAdapterPublisher:
        """The same for ordinary loops: `with AdapterPublisher.blocking(adapter="policy") as publisher: …`"""
        return BlockingAdapterPublisher(adapter, **settings)

    async def __aenter__(self) -> Self:
        self._start_thread()
        try:
            await anyio.to_thread.run_sync(self._join, abandon_on_cancel=True)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    async def publish(
        self, model: nn.Module | ExportedAdapter, *, step: int | None = None, timeout: float | None = None
    ) -> Update:
        """Return when every live node serves the adapter as it is now; raises `UpdateFailed`, naming the culprit.

        The snapshot is taken before the first await. `step` is a label of your own; `timeout`, in seconds, is by
        default `Timeouts.publish`. Raises `InvalidInput` or `InvalidLayout` for an adapter that no server could
        serve. Cancelling stops the waiting; the update may still be committed.
        """
        payload = self._snapshot(model, step)
        return await self._result(self._start(self._session.publish, payload, self._delivery(timeout)))

    async def wait_for_nodes(self, count: int, timeout: float) -> tuple[NodeStatus, ...]:
        """Wait until `count` rollout nodes follow; raises `TimeoutError` that names those that do."""
        return await self._result(self._start(self._session.wait_for_nodes, count, timeout))

    async def refresh_nodes(self) -> tuple[NodeStatus, ...]:
        """Ask the controller which rollout nodes are live now."""
        return await self._result(self._start(self._session.status))

    async def _result(self, future: Future[T]) -> T:
        return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)


class BlockingAdapterPublisher(_Publishing):
    """`AdapterPublisher` for ordinary loops: a context manager whose methods block. Made by `.blocking`."""

    def __enter__(self) -> Self:
        self._start_thread()
        try:
            self._join()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def publish(
        self, model: nn.Module | ExportedAdapter, *, step: int | None = None, timeout: float | None = None
    ) -> Update:
        """Return when every live node serves the adapter as it is now; as `AdapterPublisher.publish`."""
        payload = self._snapshot(model, step)
        return self._start(self._session.publish, payload, self._delivery(timeout)).result()

    def wait_for_nodes(self, count: int, timeout: float) -> tuple[NodeStatus, ...]:
        """Wait until `count` rollout nodes follow; raises `TimeoutError` that names those that do."""
        return self._start(self._session.wait_for_nodes, count, timeout).result()

    def refresh_nodes(self) -> tuple[NodeStatus, ...]:
        """Ask the controller which rollout nodes are live now."""
        return self._start(self._session.status).result()
