"""A world with its own time: a queue of things that will happen, processes that can stop, pause and die.

Everything random comes from one `random.Random(seed)`, and things due at the same moment happen in the order in
which they were asked for, so that a seed is a whole run.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias

Action: TypeAlias = Callable[..., None]


class Crashed(Exception):
    """Raised inside a process that is to die in the middle of what it does."""

    def __init__(self, process: Process) -> None:
        self.process = process
        super().__init__(process.name)


@dataclass(frozen=True, slots=True)
class Note:
    """One line of a story: when, who, what; `routine` lines are only in the whole trace."""

    at: float
    who: str
    what: str
    routine: bool

    def __str__(self) -> str:
        return f"{self.at:9.4f}  {self.who:<16} {self.what}"


class World:
    """Virtual time and all that will happen in it; `trace` is kept only if asked for."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.faults: Counter[str] = Counter()
        self.trace: list[Note] | None = [] if traced else None
        self._queue: list[tuple[float, int, Process | None, Action, tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time: float, process: Process | None, action: Action, *args: Any) -> None:
        """Have `action` happen at `time`, in seconds, unless its process is dead by then."""
        self._scheduled += 1
        heappush(self._queue, (time, self._scheduled, process, action, args))

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, process, action, args = heappop(self._queue)
        if process is not None:
            if not process.alive:
                return
            if process.paused_until > self.now:
                self.at(process.paused_until, process, action, *args)
                return
        self.steps += 1
        try:
            action(*args)
        except Crashed as crashed:
            crashed.process.die()

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by `end`; then it is `end`."""
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.step()
        self.now = end

    def fault(self, kind: str, who: str, what: str = "") -> None:
        """Count a fault that was really injected."""
        self.faults[kind] += 1
        if self.trace is not None:
            self.note(who, f"*** {kind}{': ' if what else ''}{what}")

    def note(self, who: str, what: str, *, routine: bool = False) -> None:
        """Add a line to the trace; callers check that there is one, so that an untraced run builds no text."""
        if self.trace is not None:
            self.trace.append(Note(self.now, who, what, routine))


class Process:
    """Something that can die, pause, and read a clock that no other process shares."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self._clock_offset = world.rng.uniform(0.0, 10_000.0)

    @property
    def clock(self) -> float:
        return self.world.now + self._clock_offset

    def after(self, delay: float, action: Action, *args: Any) -> None:
        self.world.at(self.world.now + delay, self, action, *args)

    def sleep_until(self, deadline: float, action: Action, *args: Any) -> None:
        """Have `action` happen once this process's clock is past `deadline`."""
        # A microsecond more than rounding can take away: an alarm that rings early would ring for ever.
        self.after(max(deadline - self.clock, 0.0) + 1e-6, action, *args)

    def die(self) -> None:
        """End at once; nothing that was to happen to this process happens any more."""
        self.alive = False


class Waiting:
    """An outcome that somebody else will bring about: `succeed` or `fail`, once; later ones are ignored."""

    __slots__ = ("_lane", "_process", "over")

    def __init__(self, process: Process) -> None:
        self.over = False
        self._process = process
        self._lane: Lane | None = None

    def succeed(self, value: Any = None, delay: float = 0.0) -> None:
        self._process.after(delay, self._end, value, None)

    def fail(self, error: Exception, delay: float = 0.0) -> None:
        self._process.after(delay, self._end, None, error)

    def start(self, lane: Lane) -> None:
        self._lane = lane

    def _end(self, value: Any, error: Exception | None) -> None:
        if not self.over:
            self.over = True
            assert self._lane is not None
            self._lane.resume(value, error)


Steps: TypeAlias = Generator["float | Waiting", Any, None]
"""A step of a process, written as its shell's coroutine is: it yields seconds to sleep, or what it waits for."""


class Lane:
    """Does one step after another, in the order given; the step under way can be cut short (`bus.tasks.Lane`)."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._steps: deque[Callable[[], Steps]] = deque()
        self._running: Steps | None = None
        self._waiting: Waiting | None = None

    def add(self, step: Callable[[], Steps]) -> None:
        self._steps.append(step)
        if self._running is None:
            self._process.after(0.0, self._next)

    def interrupt(self) -> Waiting | None:
        """Cancel the step under way; what it waited for."""
        running, waiting = self._running, self._waiting
        if running is None or inspect.getgeneratorstate(running) == inspect.GEN_RUNNING:
            return None
        if waiting is not None:
            waiting.over = True
        self._running = self._waiting = None
        running.close()
        self._process.after(0.0, self._next)
        return waiting

    def resume(self, value: Any, error: Exception | None) -> None:
        """Go on with the step that waited."""
        step = self._running
        assert step is not None
        self._waiting = None
        try:
            pause = step.throw(error) if error is not None else step.send(value)
        except StopIteration:
            self._running = None
            self._next()
            return
        self._waiting = Waiting(self._process) if isinstance(pause, float) else pause
        self._waiting.start(self)
        if isinstance(pause, float) and pause != float("inf"):
            self._waiting.succeed(delay=pause)

    def _next(self) -> None:
        if self._running is None and self._steps:
            self._running = self._steps.popleft()()
            self.resume(None, None)
