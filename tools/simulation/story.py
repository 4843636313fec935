"""Events in a few words, for traces and stories."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bus.events import Attempt, Event, Member, NodeCapabilities, Peer, Served
from bus.manifest import AdapterManifest


def shown(value: Any) -> str:
    """A value as a story tells it: attempts, peers and digests short, layouts and capabilities not at all."""
    match value:
        case Attempt(adapter, version, number, view):
            return f"{adapter}@{version} attempt {number} view {view}"
        case Peer(node, incarnation):
            return f"{node}#{incarnation}"
        case Served(adapter, version):
            return f"{adapter}@{version}"
        case Member(node, 0):
            return node
        case Member(node, worker):
            return f"{node}/{worker}"
        case AdapterManifest(digest=digest):
            return digest
        case NodeCapabilities() | bytes():
            return "…"
        case tuple():
            return f"[{', '.join(map(shown, value))}]"
        case float():
            return f"{value:.3g}"
        case Event():
            said = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
            told = [f"{name}={shown(one)}" for name, one in said.items() if one not in ("", (), None, False, 0.0)]
            return f"{type(value).__name__}({', '.join(told)})"
        case _:
            return str(value)
