"""Seeds to outcomes: one seed in this process, many over every core, and the story of one that went wrong."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tools.simulation.invariants import Violation
from tools.simulation.scenario import Scenario
from tools.simulation.world import Note, World

CHUNK: Final = 100
"""How many seeds a process plays before it tells."""

STORY_LINES: Final = 40
STORIES: Final = 3
"""How many violating seeds are told in full; the others are named."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one seed ended; `violation` is empty if every invariant held."""

    seed: int
    steps: int
    faults: Counter[str]
    violation: str
    trace: tuple[Note, ...] = ()

    @property
    def story(self) -> str:
        """The end of the trace, without its routine."""
        lines = [str(note) for note in self.trace if not note.routine]
        return "\n".join(lines[-STORY_LINES:])


@dataclass(slots=True)
class SimulationReport:
    """What the seeds showed. `violating` has each seed that broke an invariant, the first few with their traces."""

    nodes: int
    schedules: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violating: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    trace: tuple[Note, ...] = ()
    """The whole trace, if there was one seed only."""

    @property
    def schedules_per_second(self) -> float:
        return self.schedules / self.seconds

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.steps += outcome.steps
        self.faults.update(outcome.faults)
        if outcome.violation:
            if len(self.violating) < STORIES:
                outcome = simulate(outcome.seed, self.nodes, traced=True)
            self.violating.append(outcome)


def simulate(seed: int, nodes: int, *, traced: bool = False) -> Outcome:
    """Play one seed to its end or to its first violation."""
    world = World(seed, traced=traced)
    violation = ""
    try:
        Scenario(world, nodes).play()
    except Violation as broken:
        violation = str(broken)
        world.note("world", f"VIOLATED {violation}")
    return Outcome(seed, world.steps, world.faults, violation, tuple(world.trace or ()))


def run_simulation(seeds: int, start: int = 0, nodes: int = 5, *, processes: int | None = None) -> SimulationReport:
    """Play `seeds` seeds from `start` on, over `processes` processes (None: one a core)."""
    report = SimulationReport(nodes)
    began = time.perf_counter()
    if seeds == 1:
        outcome = simulate(start, nodes, traced=True)
        report.add(outcome)
        report.trace = outcome.trace
    else:
        for outcome in _outcomes(seeds, start, nodes, processes or os.cpu_count() or 1):
            report.add(outcome)
    report.seconds = time.perf_counter() - began
    return report


def summarised(report: SimulationReport) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "schedules": report.schedules,
        "steps": report.steps,
        "violations": len(report.violating),
        "faults": dict(sorted(report.faults.items())),
        "schedules_per_second": round(report.schedules_per_second, 1),
        "violating_seeds": [outcome.seed for outcome in report.violating],
    }


def told(report: SimulationReport) -> str:
    """The report for people: the trace of a single seed, else what happened, and a story of what went wrong."""
    lines = [str(note) for note in report.trace]
    for outcome in report.violating:
        lines.append(f"seed {outcome.seed} violates {outcome.violation}")
        if outcome.trace and not report.trace:
            lines += [outcome.story, f"the whole trace: adapterbus simulate --seeds 1 --start {outcome.seed}", ""]
    if not report.trace:
        lines += [f"{times:>10,}  {kind}" for kind, times in sorted(report.faults.items())]
    lines.append(
        f"{report.schedules:,} schedules, {report.steps:,} steps, {sum(report.faults.values()):,} faults, "
        f"{len(report.violating)} violations, {report.schedules_per_second:.0f} schedules/s"
    )
    return "\n".join(lines)


def _outcomes(seeds: int, start: int, nodes: int, processes: int) -> Iterator[Outcome]:
    if processes == 1 or seeds <= CHUNK:
        for seed in range(start, start + seeds):
            yield simulate(seed, nodes)
        return
    chunks = [(first, min(CHUNK, start + seeds - first), nodes) for first in range(start, start + seeds, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(min(processes, len(chunks)), gc.disable) as pool:
        for outcomes in pool.imap(_work, chunks):
            yield from outcomes


def _work(chunk: tuple[int, int, int]) -> list[Outcome]:
    """A chunk of seeds in a process of its own, whose garbage is collected in between only."""
    first, count, nodes = chunk
    outcomes = [simulate(seed, nodes) for seed in range(first, first + count)]
    gc.collect()
    gc.freeze()  # what is remembered from world to world is much, and is not to be looked through each time
    return outcomes
