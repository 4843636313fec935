"""What a run leaves behind: the contents of `summary.json`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bus.events import PhaseTimes
from tools.demo.probe import ProbeResult

COMMITTED: Final = "committed"
FAILED: Final = "failed"
ENDS: Final = 5
"""How many versions at each end the first and last rewards average over."""


@dataclass(slots=True)
class VersionRow:
    """One version's story: what travelled, how long each phase took, and how its samples fared.

    `reward_mean` is over the samples that this very version made, and stays None if it made none. `lag` is how
    many versions old the samples were that the version was trained on, on average. `nodes` maps each node to how
    the update ended there; `detail` says why a failed one failed.
    """

    version: int
    outcome: str
    nodes: dict[str, str]
    phases_ms: dict[str, float]
    bytes: int = 0
    tensors: int = 0
    digest: str = ""
    detail: str = ""
    lag: float = 0.0
    reward_mean: float | None = None


def phases_in_ms(phases: PhaseTimes) -> dict[str, float]:
    """The phases of an update in milliseconds, by name, in the order they happen."""
    return {name: round(seconds * 1000, 1) for name, seconds in asdict(phases).items()}


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a run measured."""

    model: str
    nodes: Sequence[str]
    task: str
    seconds: float
    versions: Sequence[VersionRow]
    heldout_reward_base: float
    heldout_reward_final: float
    lags: Sequence[int]
    requests_sent: int
    requests_failed: int
    versions_seen: Mapping[str, set[int]]
    probe: ProbeResult


def summarise(run: Run) -> dict[str, Any]:
    """The run as plain data for JSON: rewards from 0 to 1, lag in versions, sizes in bytes."""
    rewards = [row.reward_mean for row in run.versions if row.reward_mean is not None]
    return {
        "model": run.model,
        "nodes": list(run.nodes),
        "task": run.task,
        "seconds": round(run.seconds, 1),
        "versions": [asdict(row) for row in run.versions],
        "reward_first5": round(statistics.fmean(rewards[:ENDS]), 4),
        "reward_last5": round(statistics.fmean(rewards[-ENDS:]), 4),
        "heldout_reward_base": round(run.heldout_reward_base, 4),
        "heldout_reward_final": round(run.heldout_reward_final, 4),
        "lag": {"mean": round(statistics.fmean(run.lags), 3), "max": max(run.lags)},
        "requests": {"sent": run.requests_sent, "failed": run.requests_failed},
        "versions_seen": {node: sorted(seen) for node, seen in sorted(run.versions_seen.items())},
        "probe": asdict(run.probe),
    }
