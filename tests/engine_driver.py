"""A vLLM endpoint plugin for tests: drives a real `VllmEngine` by events over HTTP, with no controller between.

POST /drive takes a frame of the bus and performs the engine's part of it; the answer says what came back, or
which error was raised.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request

from bus.codec import EVENT_CODEC
from bus.errors import BusError
from bus.events import (
    AdapterReceived,
    LayoutDeclared,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    VersionCommitted,
    ViewAbandoned,
    ViewProposed,
)
from bus.manifest import AdapterLayout
from rollout_node.engine import VllmEngine
from rollout_node.plugin import AdapterBusPlugin, NodeSettings
from rollout_node.vllm_seam import ServedModels

NODE = "server"


class EngineDriver:
    name = "adapterbus-driver"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._layouts: dict[str, AdapterLayout] = {}
        self._engine: asyncio.Future[VllmEngine] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        AdapterBusPlugin(NodeSettings(address="tcp://127.0.0.1:1")).attach_router(app)
        app.post("/drive")(self._drive)
        app.get("/retired")(self._retired)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        self._task = asyncio.create_task(self._run(ServedModels(engine_client, state)))

    async def _run(self, served: ServedModels) -> None:
        async with VllmEngine.open(served, host="127.0.0.1") as engine:
            self._engine.set_result(engine)
            await asyncio.Event().wait()

    async def _retired(self) -> dict[str, Any]:
        adapter, version = await (await self._engine).wait_retired()
        return {"adapter": adapter, "version": version}

    async def _drive(self, request: Request) -> dict[str, Any]:
        event = EVENT_CODEC.decode(await request.body()).event
        try:
            return {"result": await self._perform(await self._engine, event)}
        except BusError as error:
            return {"error": type(error).__name__, "reason": str(getattr(error, "reason", "")), "text": str(error)}

    async def _perform(self, engine: VllmEngine, event: Any) -> Any:
        match event:
            case LayoutDeclared(body=body):
                layout = AdapterLayout.from_body(body)
                self._layouts[layout.digest] = layout
            case ViewProposed():
                await engine.join_view(event, NODE)
            case ViewAbandoned(view=view):
                await engine.leave_view(view)
            case UpdateAnnounced(manifest=manifest):
                await engine.prepare(event, self._layouts[manifest.layout])
            case TransferStarted():
                return await engine.receive(event)
            case AdapterReceived(attempt=attempt):
                return await engine.load(attempt)
            case VersionCommitted(attempt=attempt):
                await engine.activate(attempt)
            case UpdateAborted(attempt=attempt):
                await engine.discard(attempt)
            case _:
                return engine.capabilities
        return None
