"""Where bytes move: groups of `torch.distributed` by view, packed buffers, chunked broadcast.

The only torch import in `bus`. A `Collective` is one process's place in its groups; each group is built on the
view's own store and never touches the default group, so a job under torchrun or FSDP keeps its own.

A collective cannot be cancelled. So each group belongs to one daemon thread, from rendezvous to destructor, and
the event loop only waits for that thread, with a deadline. The thread itself sleeps in Python and polls, and
never blocks inside torch: it can be told to give up, and the process can exit at any moment. (A thread that wakes
up inside torch while the interpreter shuts down ends the process with SIGABRT.)

Gloo is what the tests run. The paths of NCCL, XCCL and HCCL are the same code with another constructor, an abort,
and a copy through the device where the buffer lives on the host; they are kept thin because they need hardware.

This module knows nothing of events, versions or vLLM.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import torch
import torch.distributed as dist
from blake3 import blake3
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, _DistributedBackendOptions

from bus.addresses import connectable
from bus.errors import InvalidAddress, InvalidInput, InvalidLayout, RendezvousFailed, TransferFailed
from bus.manifest import AdapterLayout, AdapterManifest, digest_of

T = TypeVar("T")

CHUNK_GRACE: Final = 5.0
"""Seconds that any chunk may take, whatever its size."""

FLOOR_RATE: Final = 50e6
"""Bytes per second below which a transfer counts as stalled."""

_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}

# Gloo's own timeout comes this much before ours, so that a stalled group ends in order where it can.
_MARGIN: Final = 0.1

# Device backends watch their operations themselves, and may end the process; our deadlines come long before.
_WATCHDOG: Final = timedelta(minutes=10)

_LEAVE_TIMEOUT: Final = 1.0


def backend_for(device: str) -> str:
    """The backend that fits a torch device (`cpu`, `cuda:0`, `npu`, `xpu`); raises `InvalidInput` for another."""
    kind = device.partition(":")[0]
    if kind not in _BACKENDS:
        raise InvalidInput(f"no collective backend fits device {device!r}; use one of {', '.join(_BACKENDS)}")
    return _BACKENDS[kind]


class RendezvousStore:
    """The key-value store at which the members of a view find each other; its source hosts it.

    `host` is an address of this machine that every member can reach; the store listens there and nowhere else,
    at a port the OS picks. Raises `InvalidAddress`. Blocks for some milliseconds.
    """

    def __init__(self, host: str) -> None:
        shown = f"[{host}]" if ":" in host else host
        connectable(f"tcp://{shown}:1")
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise InvalidAddress(host, f"cannot listen there ({error.strerror})") from error
        port = listener.getsockname()[1]
        self.address = f"{shown}:{port}"
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Stop listening; groups that stand are not touched, new ones cannot form. Closing twice is fine."""
        self._store = None


class AdapterBuffer:
    """One flat buffer of uint8 for an adapter's tensors, allocated and touched once, reused for every version.

    `nbytes` is its size; it fits every layout up to that size. No method may run during a transfer of the buffer.
    """

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        self.nbytes = nbytes
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def pack(self, layout: AdapterLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of any strides, dtype and device into the layout's order, shapes, dtypes and offsets.

        Bytes between tensors become zero, so equal tensors give equal bytes. Raises `InvalidLayout`, before a
        byte is written, unless `tensors` has exactly the layout's names and shapes. Blocks for about a
        millisecond per 100 tensors, or as long as the copy takes.
        """
        self._check_size(layout)
        expected = {spec.name: spec.shape for spec in layout.tensors}
        if strangers := tuple(name for name in tensors if name not in expected):
            raise InvalidLayout("tensors that are not in the layout", strangers, "Declare a new layout for them.")
        if missing := tuple(name for name in expected if name not in tensors):
            raise InvalidLayout("tensors of the layout are missing", missing, "Export the whole adapter.")
        if reshaped := tuple(name for name, shape in expected.items() if tuple(tensors[name].shape) != shape):
            raise InvalidLayout("tensors have another shape than in the layout", reshaped, "Declare a new layout.")
        with torch.no_grad():
            for (name, view), start, end in zip(
                self.views(layout).items(), layout.offsets, (*layout.offsets[1:], layout.nbytes), strict=True
            ):
                view.copy_(tensors[name])
                if (used := start + view.nbytes) < end:
                    self._bytes[used:end].zero_()

    def views(self, layout: AdapterLayout) -> dict[str, torch.Tensor]:
        """The tensors of the layout by name, each a view into this buffer: later versions overwrite them."""
        self._check_size(layout)
        return {
            spec.name: self._bytes[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec, offset in zip(layout.tensors, layout.offsets, strict=True)
        }

    def digest(self, nbytes: int) -> str:
        """The digest of the first `nbytes` bytes, as a manifest states it."""
        return digest_of(_host_bytes(self._bytes[:nbytes]))

    def renew(self) -> None:
        """Take fresh memory, of unknown content: a transfer that broke off may still write into the old."""
        self._bytes = torch.empty_like(self._bytes)

    def _check_size(self, layout: AdapterLayout) -> None:
        if layout.nbytes > self.nbytes:
            raise InvalidLayout(f"the layout needs {layout.nbytes} bytes, the buffer has {self.nbytes}")


class Collective:
    """One process's place in the groups of its views; several may live in one process.

    `device` is torch's name of the device whose backend carries the bytes, unless `backend` names another;
    `host` is the address of this machine that other members connect to. Raises `InvalidInput` if this build of
    torch has no such backend.
    """

    def __init__(self, device: str = "cpu", backend: str | None = None, host: str = "127.0.0.1") -> None:
        self.backend = backend or backend_for(device)
        if not _has_backend(self.backend):
            raise InvalidInput(
                f"this build of torch has no backend {self.backend!r} for device {device!r}; "
                f"install the device's build of torch, or choose backend 'gloo'"
            )
        self._device = torch.device("cpu" if self.backend == "gloo" else device)
        self._host = host
        self._seats: dict[int, _Seat] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Collective {self.backend} on {self._host}, views {sorted(self.views)}>"

    @property
    def views(self) -> frozenset[int]:
        """The views whose group stands here."""
        return frozenset(view for view, seat in self._seats.items() if seat.joined)

    async def join(self, view: int, *, rank: int, size: int, store: str, timeout: float) -> None:
        """Enter the group of a view as `rank` of `size`, over the store at `host:port/prefix`; wait for all.

        The store may come up late. Raises `RendezvousFailed` after `timeout` seconds, naming the ranks that
        never came (rank 0, if its store never answered), or at once if the group breaks or is left meanwhile.
        Cancelling gives up the place; the view cannot be joined again.
        """
        if view in self._seats:
            raise RendezvousFailed(view, (), timeout, "this process has joined it already")
        seat = self._seats[view] = _Seat(view, rank, size, self.backend, self._device, self._host)
        try:
            server, _, prefix = store.partition("/")
            with anyio.fail_after(timeout):
                await seat.perform(partial(seat.enter, connectable(f"tcp://{server}"), prefix, timeout))
            seat.joined = True
        except TimeoutError:
            raise RendezvousFailed(view, seat.missing, timeout, f"rank {rank} waited for {seat.awaited}") from None
        except _Broken as error:
            raise RendezvousFailed(view, seat.missing, timeout, error.problem) from None
        finally:
            if not seat.joined:
                self._abandon(view, seat)

    async def transfer(
        self,
        view: int,
        buffer: AdapterBuffer,
        manifest: AdapterManifest,
        *,
        audience: Collection[int],
        timeout: float,
    ) -> str:
        """Send the manifest's bytes from rank 0's buffer into those of the `audience`; return their digest.

        Rank 0 and every rank of the audience call this with the same manifest and audience, others do not. The
        digest is of what this rank sent or received: comparing it with the manifest's is up to the caller.
        Raises `TransferFailed` after `timeout` seconds, if a chunk takes longer than `CHUNK_GRACE` and
        `FLOOR_RATE` allow, if a peer dies, or at once if this process has no such group. After a failure or a
        cancellation the group is abandoned; a receiver's buffer has fresh memory, the sender's keeps its bytes.
        """
        seat = self._seats.get(view)
        if seat is None or not seat.joined:
            raise TransferFailed(view, "this process is in no group of that view; join a new view")
        try:
            with anyio.fail_after(timeout):
                return await seat.perform(partial(seat.move, buffer._bytes, manifest, tuple(sorted(audience)), timeout))
        except BaseException as error:
            self._abandon(view, seat)
            if not seat.is_root:
                buffer.renew()
            if isinstance(error, TimeoutError):
                raise TransferFailed(view, f"waited {timeout:g} s for {seat.awaited}") from None
            if isinstance(error, _Broken):
                raise TransferFailed(view, error.problem) from None
            raise

    async def leave(self, view: int) -> None:
        """Drop the group of a view, also while it forms or transfers; no error if there is none.

        Waits until its sockets are closed, for a second at most and also when cancelled. A group with bytes under
        way cannot close yet; it does so on its own, and the call does not wait for it.
        """
        if seat := self._seats.get(view):
            blocked = seat.blocked
            self._abandon(view, seat)
            if not blocked:
                with anyio.move_on_after(_LEAVE_TIMEOUT, shield=True):
                    await _settled(seat.closed)

    async def aclose(self) -> None:
        """Leave every view."""
        async with anyio.create_task_group() as leaving:
            for view in tuple(self._seats):
                leaving.start_soon(self.leave, view)

    def _abandon(self, view: int, seat: _Seat) -> None:
        seat.abandon()
        if self._seats.get(view) is seat:
            del self._seats[view]


class _Broken(Exception):
    """A group failed in its thread. It carries text only: a traceback would keep the group alive elsewhere."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


class _Seat:
    """One rank's place in one view, and the daemon thread that alone touches its groups.

    `perform`, `abandon`, `blocked` and `joined` are for the event loop, everything else for the thread;
    `missing` and `awaited` say what the thread waits for when a deadline passes.
    """

    def __init__(self, view: int, rank: int, size: int, backend: str, device: torch.device, host: str) -> None:
        self._view = view
        self._rank = rank
        self._others = tuple(range(1, size))
        self._backend = backend
        self._device = device
        self._host = host
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._abandoned = threading.Event()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._store: Any = None
        self._work: dist.Work | None = None
        self.joined = False
        self.missing: tuple[int, ...] = ()
        self.awaited = "its thread"
        self.closed: Future[None] = Future()
        threading.Thread(target=self._run, name=f"collective-{view}-{rank}", daemon=True).start()

    # ------------------------------------------------------------------------------- on the event loop

    @property
    def is_root(self) -> bool:
        return self._rank == 0

    async def perform(self, job: Callable[[], T]) -> T:
        """Run a job on the thread; raises what the job raised. Cancelling leaves the job running."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return await _settled(future)

    def abandon(self) -> None:
        """Make the running job fail, and the thread end, as soon as torch lets it."""
        self._abandoned.set()
        self._jobs.put(None)

    # ----------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            problem: Exception | None = None
            try:
                result = None if self._abandoned.is_set() else job()
            except _Broken as error:
                problem = _Broken(error.problem)
            except RuntimeError as error:
                problem = _Broken(_first_sentence(error))
            except Exception as error:
                problem = error
            if problem is None and self._abandoned.is_set():
                problem = _Broken("the group was abandoned")
            if problem is None:
                future.set_result(result)
            else:
                self._abandoned.set()
                # Before anyone hears of it: a caller that now exits must not meet this thread inside torch.
                if not self.blocked:
                    self._dissolve()
                future.set_exception(problem)
            entry = job = future = problem = result = None  # type: ignore[assignment]  # they hold the buffer
        self._dissolve()
        self.closed.set_result(None)

    def enter(self, store: tuple[str, int], prefix: str, timeout: float) -> None:
        """Connect to the store, and form the group of the whole view."""
        self._prefix = f"{prefix}/view/{self._view}".lstrip("/")
        self.awaited = f"the store at {store[0]}:{store[1]}"
        self.missing = (0,) if self._rank else ()
        # A thread that waits in TCPStore's constructor could not be abandoned, so knock first.
        while True:
            try:
                socket.create_connection(store, timeout=1).close()
                break
            except OSError:
                self._pause(0.05)
        self._store = TCPStore(*store, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        self._groups[self._others] = self._form(self._prefix, self._others, timeout)

    def move(self, data: torch.Tensor, manifest: AdapterManifest, audience: tuple[int, ...], timeout: float) -> str:
        """Broadcast chunk by chunk from rank 0 to the audience, hashing what is settled while the next one travels."""
        deadline = time.monotonic() + timeout
        if not set(audience) <= set(self._others) or (self._rank and self._rank not in audience):
            raise _Broken(f"rank {self._rank} cannot take part in a transfer from rank 0 to ranks {audience}")
        if manifest.nbytes > data.nbytes:
            raise _Broken(f"the manifest has {manifest.nbytes} bytes, the buffer {data.nbytes}")
        if audience not in self._groups:
            name = f"{self._prefix}/to/{','.join(map(str, audience))}"
            self._groups[audience] = self._form(name, audience, timeout)
        group, root = self._groups[audience], self._rank == 0
        hasher = blake3()
        settled = data[:0]
        for start, end in manifest.chunks():
            self.awaited = f"bytes {start} to {end} of {manifest.nbytes}"
            chunk = data[start:end]
            on_wire = chunk if chunk.device.type == self._device.type else torch.empty_like(chunk, device=self._device)
            if root and on_wire is not chunk:
                on_wire.copy_(chunk)
            limit = min(CHUNK_GRACE + (end - start) / FLOOR_RATE, deadline - time.monotonic())
            with self._broadcast(group, on_wire, limit):
                hasher.update(_host_bytes(chunk if root else settled))
            if not root:
                chunk.copy_(on_wire)
                settled = chunk
        if not root:
            hasher.update(_host_bytes(settled))
        return f"blake3:{hasher.hexdigest()}"

    def _form(self, name: str, audience: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
        """A group of rank 0 and the audience. All must be present in the store before any of them connects."""
        ranks = (0, *audience)
        store: Any = PrefixStore(name, self._store)
        store.append("present", f"{self._rank},")
        delay = 0.001
        while True:
            try:
                present = set(store.get("present").decode().split(","))
            except RuntimeError:
                # The store went, and took with it who is there: only its host is known to be missing.
                self.missing = (0,) if self._rank else ()
                raise
            self.missing = tuple(rank for rank in ranks if str(rank) not in present)
            if not self.missing:
                break
            self.awaited = f"ranks {', '.join(map(str, self.missing))} in {name}/present"
            self._pause(delay)
            delay = min(delay * 1.5, 0.05)
        self.awaited = f"connections in {name}"
        index, members = ranks.index(self._rank), PrefixStore("group", store)
        group: dist.ProcessGroup
        if self._backend == "gloo":
            group = _gloo_group(members, index, len(ranks), timeout, self._host)
        else:
            group = _device_group(self._backend, members, index, len(ranks))
            # Device backends connect at their first operation; a publish must find its group standing.
            with self._broadcast(group, torch.zeros(1, dtype=torch.uint8, device=self._device), timeout):
                pass
        return group

    @contextlib.contextmanager
    def _broadcast(self, group: dist.ProcessGroup, tensor: torch.Tensor, limit: float) -> Iterator[None]:
        """Broadcast while the body runs, and wait for its end; raises torch's error, or `_Broken` at the limit."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(limit - _MARGIN, 0.001))
        started = time.monotonic()
        self._work = work = group.broadcast([tensor], options)
        yield
        while not work.is_completed():
            if (elapsed := time.monotonic() - started) > limit:
                raise _Broken(f"waited {elapsed:.1f} s for {self.awaited}")
            self._pause(min(max(elapsed / 8, 0.0001), 0.01))
        work.wait()
        self._work = None

    def _pause(self, seconds: float) -> None:
        if self._abandoned.wait(seconds):
            raise _Broken("the group was abandoned")

    @property
    def blocked(self) -> bool:
        """Whether a broadcast is under way that nothing can stop."""
        work = self._work
        return self._backend == "gloo" and work is not None and not work.is_completed()

    def _dissolve(self) -> None:
        """Drop the groups and the store. Gloo's destructor would block on a broadcast under way, so outlive that."""
        while self.blocked:
            time.sleep(0.02)
        if self._backend != "gloo":
            for group in self._groups.values():
                with contextlib.suppress(RuntimeError):
                    group.abort()
        self._work = None
        self._groups.clear()
        self._store = None


def _has_backend(backend: str) -> bool:
    return (
        backend == "gloo"
        or hasattr(dist.distributed_c10d, f"ProcessGroup{backend.upper()}")
        or backend.upper() in dist.Backend._plugins
    )


def _gloo_group(store: Store, rank: int, size: int, timeout: float, host: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _device_group(backend: str, store: Store, rank: int, size: int) -> Any:
    """NCCL and XCCL come with torch; others are what their package registered (`torch_npu`: HCCL)."""
    if native := getattr(dist.distributed_c10d, f"ProcessGroup{backend.upper()}", None):
        settings = native.Options()
        settings._timeout = _WATCHDOG
        return native(store, rank, size, settings)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, _WATCHDOG)
    options = _DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = size
    options.timeout = _WATCHDOG
    options.group_id = "adapterbus"
    options.global_ranks_in_group = []
    return plugin.creator_fn(options, None)


async def _settled(future: Future[T]) -> T:
    """Wait for a future that another thread settles, on any event loop; cancelling ends the wait only."""
    done, token, loop_thread = anyio.Event(), anyio.lowlevel.current_token(), threading.get_ident()

    def wake(_: Future[T]) -> None:
        if threading.get_ident() == loop_thread:
            done.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is over: nobody waits any more
                anyio.from_thread.run_sync(done.set, token=token)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().numpy().data


def _first_sentence(error: Exception) -> str:
    """What torch said, without the path of its source file, the advice and the stack."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(". This is typically")[0]
