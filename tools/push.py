"""`adapterbus push`: one saved adapter to a running fleet."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console
from rich.table import Table

from bus.capabilities import check_servable
from bus.errors import Refused, UpdateFailed
from bus.events import Phase, StatusReported
from bus.manifest import AdapterLayout
from tools.status import ask
from trainer_node.adapter_directory import read_adapter_directory

if TYPE_CHECKING:
    from trainer_node import Update


def push_directory(
    directory: Path, *, address: str, adapter: str | None, base_model: str | None, timeout: float, as_json: bool
) -> None:
    """Publish a saved adapter and print what became of it; raises what the publisher and the reader raise."""
    saved = read_adapter_directory(directory, base_model=base_model)
    name = adapter or directory.resolve().name
    _refuse_early(name, saved.layout, anyio.run(ask, address))
    from trainer_node import AdapterPublisher

    node = f"push-{socket.gethostname()}-{os.getpid()}"
    with AdapterPublisher.blocking(name, address=address, node=node) as publisher:
        update = publisher.publish(saved.load(), timeout=timeout)
    if as_json:
        print(json.dumps(summarised(update), indent=2))
    else:
        _show(update)


def _refuse_early(adapter: str, layout: AdapterLayout, fleet: StatusReported) -> None:
    """Ask each node's capabilities before torch is imported: a no within a second is worth more than one after five."""
    for node in fleet.nodes:
        if node.capabilities is not None and node.wants(adapter):
            try:
                check_servable(layout, node.capabilities)
            except Refused as refused:
                raise UpdateFailed(
                    adapter,
                    0,
                    node=node.peer.node,
                    phase=Phase.READY,
                    reason=refused.reason,
                    detail=refused.detail,
                    seconds=0.0,
                ) from None


def summarised(update: Update) -> dict[str, Any]:
    """An update as plain data; times in milliseconds."""
    phases = update.phases
    return {
        "adapter": update.adapter,
        "version": update.version,
        "bytes": update.nbytes,
        "tensors": update.tensors,
        "digest": update.digest,
        "phases_ms": {
            name: round(getattr(phases, name) * 1e3, 1) for name in ("ready", "transfer", "load", "commit", "total")
        },
        "nodes": {outcome.node: outcome.outcome.value for outcome in update.nodes},
    }


def _show(update: Update) -> None:
    told = summarised(update)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("version", f"{update.adapter}@{update.version}")
    table.add_row("bytes", f"{update.nbytes:,} in {update.tensors} tensors")
    table.add_row("digest", update.digest)
    table.add_row("phases", ", ".join(f"{name} {ms:g} ms" for name, ms in told["phases_ms"].items()))
    table.add_row("nodes", ", ".join(f"{node} {outcome}" for node, outcome in told["nodes"].items()))
    Console().print(table)
