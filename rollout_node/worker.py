"""Inside each vLLM worker process: a thread that receives and builds adapters while the engine decodes.

`AdapterWorkerExtension` is what vLLM mixes into its worker (`--worker-extension-cls`). Only three of its methods
are ever called through the engine: one to start the thread, one to fill a slot, one to empty it. Everything slow
goes over the node's own socket to the thread, so that no decode step waits for a transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from bus.collective import AdapterBuffer, Collective
from bus.errors import EngineUnsupported, LoadFailed, Refused, RendezvousFailed, TransferFailed
from bus.events import Attempt, Envelope, Reason
from bus.manifest import AdapterLayout, AdapterManifest
from bus.transport import Dealer
from rollout_node.commands import (
    ANSWER_CODEC,
    COMMAND_CODEC,
    Answer,
    Attached,
    Build,
    BytesHeld,
    Command,
    Discard,
    Done,
    Failed,
    Failure,
    JoinGroup,
    LeaveGroup,
    Prepare,
    Receive,
    Verify,
)
from rollout_node.vllm_seam import AdapterSlots

log = logging.getLogger(__name__)


class AdapterWorkerExtension:
    """Mixed into vLLM's worker; its methods answer with plain maps, as `collective_rpc` can carry them."""

    _adapterbus_thread: WorkerThread

    def adapterbus_attach(self, address: str, host: str) -> dict[str, Any]:
        """Start the thread that listens at the agent's socket; says what this worker can serve.

        `host` is the interface that groups are formed on. Once in a worker's life.
        """
        with _plain_errors() as answer:
            slots = AdapterSlots(self)
            rank: int = self.rank  # type: ignore[attr-defined]  # vLLM's worker has it
            self._adapterbus_thread = WorkerThread(slots, rank, address, host)
            answer |= {
                "worker": rank,
                "device": slots.device,
                "dtype": slots.dtype,
                "modules": list(slots.module_names),
            }
        return answer

    def adapterbus_fill(self, adapter: str, version: int, number: int, view: int) -> dict[str, Any]:
        """Put the adapter built for this attempt into a slot of its own, the only step that holds the engine up."""
        with _plain_errors() as answer:
            started = time.monotonic()
            answer |= self._adapterbus_thread.staging.fill(Attempt(adapter, version, number, view))
            answer |= {"worker": self._adapterbus_thread.worker, "seconds": time.monotonic() - started}
        return answer

    def adapterbus_remove(self, lora_id: int) -> dict[str, Any]:
        """Empty an adapter's slot; no error if it holds none."""
        with _plain_errors() as answer:
            answer |= {"removed": self._adapterbus_thread.staging.slots.remove(lora_id)}
        return answer


@contextmanager
def _plain_errors() -> Iterator[dict[str, Any]]:
    """An answer that says what went wrong instead of raising: an exception here would reach the engine."""
    answer: dict[str, Any] = {}
    try:
        yield answer
    except EngineUnsupported as error:
        answer |= {"reason": Reason.ENGINE_FAILED.value, "error": error.missing}
    except LoadFailed as error:
        answer |= {"reason": str(error.reason), "error": error.detail}
    except Exception as error:  # whatever vLLM throws, the engine must go on decoding
        log.exception("adapterbus: a call into the worker failed")
        answer |= {"reason": Reason.ENGINE_FAILED.value, "error": f"{type(error).__name__}: {error}"}


@dataclass(slots=True)
class Staged:
    """An attempt on its way: the buffer it arrives in, then the adapter built from it."""

    layout: AdapterLayout
    manifest: AdapterManifest
    buffer: AdapterBuffer
    digest: str = ""
    model: Any = None


class Staging:
    """Every attempt between its announcement and its slot, on one worker.

    The buffer of an adapter is kept for its next version: touching fresh pages costs more than the broadcast.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._staged: dict[Attempt, Staged] = {}
        self._spare: dict[str, AdapterBuffer] = {}

    def prepare(self, attempt: Attempt, body: bytes, manifest: AdapterManifest) -> None:
        """Raises `Refused`; nothing is kept then."""
        layout = AdapterLayout.from_body(body)
        self.slots.check(layout)
        buffer = self._spare.pop(attempt.adapter, None)
        if buffer is None or buffer.nbytes != layout.nbytes:
            buffer = AdapterBuffer(layout.nbytes, self.slots.device)
        self._staged[attempt] = Staged(layout, manifest, buffer)

    def __getitem__(self, attempt: Attempt) -> Staged:
        """Raises `LoadFailed` for an attempt that was never prepared, or is forgotten already."""
        try:
            return self._staged[attempt]
        except KeyError:
            raise LoadFailed(Reason.ENGINE_FAILED, f"{attempt} is not staged on this worker") from None

    def build(self, attempt: Attempt, lora_id: int) -> None:
        staged = self[attempt]
        if staged.digest != staged.manifest.digest:
            raise LoadFailed(
                Reason.DIGEST_MISMATCH,
                f"received {staged.digest or 'nothing'}, the manifest says {staged.manifest.digest}",
            )
        staged.model = self.slots.build(staged.layout, staged.buffer.views(staged.layout), lora_id)

    def fill(self, attempt: Attempt) -> dict[str, Any]:
        """Called from the engine's own thread, between two steps."""
        staged = self[attempt]
        if staged.model is None:
            raise LoadFailed(Reason.ENGINE_FAILED, f"{attempt} was not built")
        matched = self.slots.fill(staged.model, staged.layout)
        return {"digest": staged.digest, "matched": matched, "total": len(staged.layout.tensors)}

    def verify(self, attempt: Attempt) -> None:
        differing = self.slots.differing_modules(self[attempt].model)
        if differing:
            raise LoadFailed(
                Reason.MODULES_UNMATCHED,
                f"the slot differs from what was sent in {len(differing)} modules, first {differing[0]}",
            )
        self.drop(attempt)

    def drop(self, attempt: Attempt) -> None:
        """Forget an attempt; a transfer that broke off has left its buffer with memory of its own."""
        staged = self._staged.pop(attempt, None)
        if staged is not None:
            self._spare[attempt.adapter] = staged.buffer


class WorkerThread:
    """The thread beside the engine: its own event loop, its own line to the agent, its own process groups."""

    def __init__(self, slots: AdapterSlots, worker: int, address: str, host: str) -> None:
        self.staging = Staging(slots)
        self.worker = worker
        self._address = address
        self._host = host
        self._receiving: dict[Attempt, anyio.CancelScope] = {}
        # A daemon: a worker that vLLM ends must not wait for a collective that nobody completes.
        threading.Thread(target=self._run, name="adapterbus", daemon=True).start()

    def _run(self) -> None:
        try:
            anyio.run(self._follow)
        except Exception:
            log.exception("adapterbus: worker %d follows its agent no more", self.worker)

    async def _follow(self) -> None:
        async with (
            Dealer.open(self._address, f"worker-{self.worker}".encode()) as dealer,
            aclosing(Collective(self.staging.slots.device, host=self._host)) as collective,
            anyio.create_task_group() as group,
        ):
            self._answer(dealer, 0, Attached(self.worker))
            while True:
                envelope = COMMAND_CODEC.decode(await dealer.receive())
                group.start_soon(self._obey, dealer, collective, envelope)

    def _answer(self, dealer: Dealer, number: int, answer: Answer) -> None:
        dealer.send_nowait(ANSWER_CODEC.encode(Envelope("", number, answer)))

    async def _obey(self, dealer: Dealer, collective: Collective, envelope: Envelope) -> None:
        """Do one command and answer it, whatever comes of it."""
        answer: Answer
        try:
            answer = await self._do(collective, envelope.event)
        except RendezvousFailed as error:
            answer = Failed(self.worker, Failure.RENDEZVOUS, "", error.cause or str(error), error.missing)
        except TransferFailed as error:
            answer = Failed(self.worker, Failure.TRANSFER, "", error.problem)
        except Refused as error:
            answer = Failed(self.worker, Failure.REFUSED, str(error.reason), error.detail)
        except LoadFailed as error:
            answer = Failed(self.worker, Failure.LOAD, str(error.reason), error.detail)
        except Exception as error:  # the agent waits for this answer, and must hear of a bug too
            log.exception("adapterbus: %s failed", type(envelope.event).__name__)
            answer = Failed(self.worker, Failure.LOAD, Reason.ENGINE_FAILED.value, f"{type(error).__name__}: {error}")
        self._answer(dealer, envelope.sequence, answer)

    async def _do(self, collective: Collective, command: Command) -> Answer:
        match command:
            case JoinGroup(view, ranks, size, store, timeout):
                await collective.join(view, rank=ranks[self.worker], size=size, store=store, timeout=timeout)
            case LeaveGroup(view):
                await collective.leave(view)
            case Prepare(attempt, layout, manifest):
                self.staging.prepare(attempt, layout, manifest)
            case Receive():
                return await self._receive(collective, command)
            case Build(attempt, lora_id):
                self.staging.build(attempt, lora_id)
            case Verify(attempt):
                self.staging.verify(attempt)
            case Discard(attempt):
                if attempt in self._receiving:
                    self._receiving[attempt].cancel()
                self.staging.drop(attempt)
        return Done(self.worker)

    async def _receive(self, collective: Collective, command: Receive) -> Answer:
        attempt = command.attempt
        staged = self.staging[attempt]
        started = time.monotonic()
        with anyio.CancelScope() as scope:
            self._receiving[attempt] = scope
            try:
                staged.digest = await collective.transfer(
                    attempt.view,
                    staged.buffer,
                    staged.manifest,
                    audience=command.audience,
                    timeout=command.timeout,
                )
            finally:
                del self._receiving[attempt]
        if scope.cancelled_caught:
            raise TransferFailed(attempt.view, "the attempt was discarded while its bytes were on their way")
        return BytesHeld(self.worker, staged.digest, time.monotonic() - started)
