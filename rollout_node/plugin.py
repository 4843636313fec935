"""The vLLM endpoint plugin: runs the node's agent in the API server's event loop.

vLLM finds it by the entry point `adapterbus` in the group `vllm.endpoint_plugins`, if `VLLM_PLUGINS` names it.
Without an address of a controller in the environment it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from argparse import Namespace
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from bus.errors import BusError
from bus.follower import follow
from bus.transport import local_host_towards
from rollout_node.engine import VllmEngine
from rollout_node.vllm_seam import ServedModels, list_by_name

log = logging.getLogger(__name__)

ANY_HOST: Final = frozenset({None, "", "0.0.0.0", "::"})


class NodeSettings(BaseSettings):
    """What a node is told through its environment, each as `ADAPTERBUS_…`."""

    model_config = SettingsConfigDict(env_prefix="ADAPTERBUS_")

    address: str = ""
    """The controller, `tcp://host:port`; empty: stay off the bus."""

    node: str | None = None
    """This node's name on the bus, unique in the fleet; none: its host and process."""

    host: str = ""
    """The interface that groups are formed on; empty: the one that reaches the controller."""

    adapters: tuple[str, ...] = ()
    """The adapters to follow, as a JSON list; none: every adapter of the fleet."""

    retain: int | None = Field(default=None, ge=1)
    """Versions of an adapter that stay addressable; none: as many as leave one slot free."""


class AdapterBusPlugin:
    """Satisfies `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "adapterbus"
    required_tasks = ("generate",)

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._agent: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Replace vLLM's listing of models by one that names each adapter as requests do."""
        if not self._settings.address:
            return

        @app.get("/v1/models")
        async def show_available_models(raw_request: Request) -> JSONResponse:
            listed = await list_by_name(raw_request.app.state.openai_serving_models)
            return JSONResponse(content=listed.model_dump())

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the agent beside the server; it ends with the server's event loop."""
        if not self._settings.address or engine_client is None:
            return
        _log_through_vllm()
        self._agent = asyncio.create_task(self._follow(engine_client, state, args), name="adapterbus")

    async def _follow(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Follow the bus for ever. Whatever ends it, the server goes on with what it serves."""
        settings = self._settings
        try:
            host = settings.host or await asyncio.to_thread(local_host_towards, settings.address)
            reachable = socket.gethostname() if args.host in ANY_HOST else args.host
            async with VllmEngine.open(
                ServedModels(engine_client, state),
                host=host,
                endpoint=f"http://{reachable}:{args.port}",
                retain=settings.retain,
            ) as engine:
                log.info("following the bus at %s", settings.address)
                await follow(engine, address=settings.address, node=settings.node, adapters=settings.adapters)
        except BusError as error:
            log.error("this server does NOT follow the bus: %s", error)
        except Exception:
            log.exception("this server does NOT follow the bus any more, and serves what it has")


def plugin() -> AdapterBusPlugin:
    """The factory behind the entry point."""
    return AdapterBusPlugin(NodeSettings())


def _log_through_vllm() -> None:
    """Have our lines appear among the server's own: vLLM sets up its own logger, and nobody else's."""
    server = logging.getLogger("vllm")
    for name in ("bus", "rollout_node"):
        ours = logging.getLogger(name)
        ours.setLevel(server.level)
        ours.handlers = list(server.handlers)
        ours.propagate = False
