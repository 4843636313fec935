"""The demo's inference servers: child processes of this one, started together and always taken down again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import httpx
from anyio.abc import Process

from bus.errors import ServerFailed
from tools.demo.learner import LORA_RANK

START_TIMEOUT: Final = 300.0
STOP_TIMEOUT: Final = 10.0
MAX_MODEL_TOKENS: Final = 512
LOG_TAIL_LINES: Final = 15

_LOG_PREFIX: Final = re.compile(r"^(\(\w+ pid=\d+\)\s*)?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d )?(\[[^\]]+\] )?")


@dataclass(frozen=True, slots=True)
class Server:
    """One server process, the leader of its own process group, and where its output goes."""

    node: str
    process: Process
    url: str
    log: Path


@asynccontextmanager
async def running_servers(
    model: str, bus: str, count: int, directory: Path, progress: Callable[[str, str], None]
) -> AsyncIterator[list[Server]]:
    """`count` servers that follow the bus, all answering; `progress` hears (node, what it is doing).

    Raises `ServerFailed` with the end of the log if one ends or does not answer within `START_TIMEOUT`. On
    leaving, also by cancellation or error, every server's process group gets SIGTERM, then SIGKILL.
    """
    servers: list[Server] = []
    try:
        for index in range(count):
            servers.append(await _start(model, bus, index, directory))
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(_wait_answering, server, progress)
        yield servers
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(servers)


async def _start(model: str, bus: str, index: int, directory: Path) -> Server:
    node, port = f"node-{index}", _free_port()
    log = directory / f"{node}.log"
    # Without a core of its own each CPU server binds to the first one, and they starve each other.
    core = str(index % (os.cpu_count() or 1))
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": core, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        process = await anyio.open_process(
            server_command(model, bus, node, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(node, process, f"http://127.0.0.1:{port}", log)


async def _wait_answering(server: Server, progress: Callable[[str, str], None]) -> None:
    started = time.monotonic()
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while time.monotonic() - started < START_TIMEOUT:
            if server.process.returncode is not None:
                problem = f"the server ended with exit code {server.process.returncode} before it answered"
                raise ServerFailed(server.node, f"{problem}; its log is {server.log}", log_tail(server.log))
            with suppress(httpx.TransportError):
                if (await client.get(f"{server.url}/health")).is_success:
                    progress(server.node, f"answers at {server.url} after {time.monotonic() - started:.0f} s")
                    return
            progress(server.node, f"starting: {last_message(server.log)}")
            await anyio.sleep(0.5)
    problem = f"the server did not answer within {START_TIMEOUT:g} s; its log is {server.log}"
    raise ServerFailed(server.node, problem, log_tail(server.log))


async def _stop(servers: list[Server]) -> None:
    for server in servers:
        _signal_group(server, signal.SIGTERM)
    with anyio.move_on_after(STOP_TIMEOUT):
        for server in servers:
            await server.process.wait()
    for server in servers:
        # The group, not only its leader: vLLM's engine processes may outlive the server that started them.
        _signal_group(server, signal.SIGKILL)
        await server.process.wait()


def _signal_group(server: Server, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, number)


def server_command(model: str, bus: str, node: str, port: int) -> list[str]:
    """What a person would type to start the same server by hand."""
    return [
        *(sys.executable, "-m", "tools", "serve", model, "--bus", bus, "--node", node),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "32"),
        # Prompts differ in their last tokens only: small blocks let the prefix cache keep the rest.
        *("--block-size", "32"),
        *("--max-lora-rank", str(LORA_RANK)),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def last_message(log: Path) -> str:
    """The newest line of a log without vLLM's process, time and place, at most 80 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return _LOG_PREFIX.sub("", lines[-1])[:80] if lines else "no output yet"
