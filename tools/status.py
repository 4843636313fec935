"""`adapterbus status`: the controller's picture of the fleet, as tables or as JSON."""

from __future__ import annotations

from typing import Any, Final

import anyio
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.client import Connection, new_peer
from bus.errors import ControllerUnreachable
from bus.events import NodeStatus, Role, StatusReported, StatusRequested

ANSWER_TIMEOUT: Final = 3.0


async def ask(address: str) -> StatusReported:
    """Ask the controller once; raises `ControllerUnreachable`. Reads only."""
    peer = new_peer()
    async with Connection.open(address, peer, Role.OBSERVER, timeout=ANSWER_TIMEOUT) as connection:
        connection.send(StatusRequested(peer))
        with anyio.move_on_after(ANSWER_TIMEOUT):
            while True:
                event = await connection.receive()
                if isinstance(event, StatusReported):
                    return event
    raise ControllerUnreachable(address, ANSWER_TIMEOUT)


def summarised(report: StatusReported) -> dict[str, Any]:
    """The report as plain data: `nodes`, `adapters`, `updates`, `completed`, `counters`, `sequence`."""
    return {
        "sequence": report.sequence,
        "nodes": [
            {
                "node": node.peer.node,
                "incarnation": node.peer.incarnation,
                "role": node.role.value,
                "following": node.following,
                "silence_ms": round(node.silence * 1e3),
                "quarantine_s": round(node.quarantine, 1),
                "endpoint": node.capabilities.endpoint if node.capabilities else None,
                "engine": f"{node.capabilities.engine} {node.capabilities.engine_version}"
                if node.capabilities
                else None,
                "max_rank": node.capabilities.max_rank if node.capabilities else None,
                "slots": node.capabilities.slots if node.capabilities else None,
                "serves": {served.adapter: served.version for served in node.served},
                "lag": _lags(report, node),
            }
            for node in report.nodes
        ],
        "adapters": [{"adapter": head.adapter, "head": head.version, "digest": head.digest} for head in report.heads],
        "updates": [
            {
                "adapter": update.attempt.adapter,
                "version": update.attempt.version,
                "phase": update.phase.value,
                "seconds": update.seconds,
                "waiting_for": list(update.waiting_for),
            }
            for update in report.updates
        ],
        "completed": [
            {
                "adapter": done.attempt.adapter,
                "version": done.attempt.version,
                "total_ms": round(done.phases.total * 1e3, 1),
                "nodes": {outcome.node: outcome.outcome.value for outcome in done.outcomes},
            }
            for done in report.completed
        ],
        "counters": dict(report.counters),
    }


def rendered(report: StatusReported, address: str) -> RenderableType:
    """Tables for a terminal of 80 columns; the words stand without the colours."""
    nodes = Table("node", "role", "state", "serves", "lag", "endpoint", box=None, pad_edge=False)
    for node in report.nodes:
        lags = _lags(report, node).values() if node.role is Role.ROLLOUT else ()
        lag = max(lags, default=0)
        nodes.add_row(
            node.peer.node,
            node.role.value,
            _state(node),
            ", ".join(f"{served.adapter}@{served.version}" for served in node.served) or "-",
            Text(str(lag), style="yellow" if lag else "") if node.role is Role.ROLLOUT else "",
            (node.capabilities.endpoint if node.capabilities else "").removeprefix("http://"),
        )
    adapters = Table("adapter", "head", "digest", box=None, pad_edge=False)
    for head in report.heads:
        adapters.add_row(head.adapter, str(head.version), head.digest[:23])
    parts: list[RenderableType] = [Text(f"controller {address}, journal at {report.sequence}", style="bold"), ""]
    parts.append(nodes if report.nodes else "no trainer and no rollout node has joined")
    if report.heads:
        parts += ["", adapters]
    for update in report.updates:
        waiting = f", waits for {', '.join(update.waiting_for)}" if update.waiting_for else ""
        parts += ["", f"{update.attempt}: {update.phase} since {update.seconds:.1f} s{waiting}"]
    return Group(*parts)


def _state(node: NodeStatus) -> Text:
    if node.quarantine:
        return Text(f"quarantined {node.quarantine:.0f} s", style="red")
    if not node.following:
        return Text("joining", style="yellow")
    if node.silence > 1.5:
        return Text(f"silent {node.silence:.1f} s", style="yellow")
    return Text("live", style="green")


def _lags(report: StatusReported, node: NodeStatus) -> dict[str, int]:
    """How many versions a rollout node is behind each head it follows."""
    if node.role is not Role.ROLLOUT:
        return {}
    serves = {served.adapter: served.version for served in node.served}
    return {
        head.adapter: head.version - serves.get(head.adapter, 0) for head in report.heads if node.wants(head.adapter)
    }
