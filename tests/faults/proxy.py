"""A SOCKS5 proxy that can lose the network: ZeroMQ sends a node's whole control plane through it (ZMQ_SOCKS_PROXY).

While it is cut, bytes go in and nothing comes out, and no connection is closed: what a pulled cable or a firewall
does. Healing delivers what was held back, late, as TCP does after a partition.

It never breaks off a handshake of its own: libzmq 4.3.5 aborts the process when a SOCKS proxy does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Proxy:
    """Runs on a thread of its own; opened with `Proxy.open`. `address` is `host:port`."""

    def __init__(self) -> None:
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Self]:
        proxy = cls()
        proxy._whole.set()
        thread = threading.Thread(target=proxy._loop.run_forever, name="proxy", daemon=True)
        thread.start()
        server = proxy._do(lambda: asyncio.start_server(proxy._serve, "127.0.0.1", 0))
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            proxy._do(lambda: proxy._close(server))
            proxy._loop.call_soon_threadsafe(proxy._loop.stop)
            thread.join()
            proxy._loop.close()

    def cut(self) -> None:
        async def cut() -> None:
            self._whole.clear()

        self._do(cut)

    def heal(self) -> None:
        async def heal() -> None:
            self._whole.set()

        self._do(heal)

    def _do(self, job: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await job()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        ends = [writer]
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                host, port = await _asked_for(reader, writer)
                far_reader, far_writer = await asyncio.open_connection(host, port)
                ends.append(far_writer)
                writer.write(b"\x05\x00\x00\x01" + socket.inet_aton("127.0.0.1") + struct.pack(">H", port))
                await _first_of(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._links.discard(task)
                for end in ends:
                    end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._whole.wait()
            sink.write(data)
            await sink.drain()


async def _first_of(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends: when one side of a link has closed, so does the other."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _asked_for(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """The SOCKS5 greeting (RFC 1928): no authentication, CONNECT to an IPv4 address or a name."""
    _, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    writer.write(b"\x05\x00")
    _, _, _, kind = await reader.readexactly(4)
    if kind == 1:
        host = socket.inet_ntoa(await reader.readexactly(4))
    else:
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
    (port,) = struct.unpack(">H", await reader.readexactly(2))
    return host, port
