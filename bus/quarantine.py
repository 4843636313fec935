"""Nodes that are lost again and again: out of the views for a while, longer each time. Pure.

A flapping node costs every update an attempt; the fleet goes on without it, and says so (case B118).
"""

from __future__ import annotations

from collections import deque

from bus.protocol import Timeouts


class Quarantine:
    """Counts losses by node name, whatever the incarnation."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._losses: dict[str, deque[float]] = {}
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def note_loss(self, node: str, now: float) -> float:
        """A node was lost; for how many seconds it is now kept out, 0 if not at all."""
        losses = self._losses.setdefault(node, deque(maxlen=self._timeouts.losses))
        if losses and now - losses[-1] > self._timeouts.loss_window:
            losses.clear()
            self._times.pop(node, None)
        losses.append(now)
        if len(losses) < self._timeouts.losses:
            return 0.0
        self._times[node] = self._times.get(node, 0) + 1
        seconds = min(self._timeouts.quarantine * 2.0 ** (self._times[node] - 1), self._timeouts.quarantine_limit)
        self._until[node] = now + seconds
        return seconds

    def __contains__(self, node: str) -> bool:
        return node in self._until

    def remaining(self, node: str, now: float) -> float:
        """For how many seconds a node still stays out."""
        return max(self._until.get(node, now) - now, 0.0)

    def release(self, now: float) -> None:
        """Let those back in whose time is over."""
        for node in [node for node, until in self._until.items() if until <= now]:
            del self._until[node]

    def deadlines(self) -> list[float]:
        return list(self._until.values())
