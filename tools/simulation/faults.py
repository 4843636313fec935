"""Which faults a schedule has, and how often: each seed draws a few kinds, so that rare combinations meet."""

from __future__ import annotations

from random import Random
from typing import Final, Self

from tools.simulation.network import Weather
from tools.simulation.world import World

STEP_FAULTS: Final[dict[str, tuple[str, ...]]] = {
    "prepare": ("refuses", "fails", "is slow", "hangs"),
    "load": ("fails", "is slow", "hangs"),
    "activate": ("fails", "is slow", "hangs"),
    "join": ("fails", "hangs"),
    "transfer": ("fails", "hangs", "wrong bytes"),
}
"""What may go wrong in each step of an engine or a collective."""

SUBJECTS: Final = {
    "prepare": "engine",
    "load": "engine",
    "activate": "engine",
    "join": "group",
    "transfer": "collective",
}

EVENTS: Final = (
    "node crash",
    "node leave",
    "node restart unnoticed",
    "node paused",
    "two nodes of one name",
    "trainer crash",
    "trainer paused",
    "trainer replaced",
    "controller crash",
    "controller crash between effects",
    "controller paused",
    "controller and trainer crash",
    "journal full",
    "partition that swallows",
    "partition that holds",
)
"""What may happen to processes and to the network as a whole."""

DURATIONS: Final[dict[str, tuple[float, float]]] = {
    "latency": (0.001, 0.01),
    "join": (0.005, 0.1),
    "prepare": (0.005, 0.1),
    "transfer": (0.01, 0.2),
    "load": (0.01, 0.3),
    "activate": (0.0, 0.02),
    "slow": (0.5, 4.0),
}
"""How long each step takes, in seconds."""


class Plan:
    """The faults of one world: how likely each step fails in each way, the weather, and what happens to processes."""

    def __init__(
        self,
        world: World,
        weather: Weather | None = None,
        rates: dict[str, tuple[tuple[float, str], ...]] | None = None,
        events: tuple[str, ...] = (),
    ) -> None:
        self.weather = weather or Weather()
        self.events = events
        self._world = world
        self._random: Random = world.rng
        self._rates = rates or {}
        self._doomed: dict[str, str] = {}
        self.spares_the_wires = self.weather.is_calm and not events
        """Whether every message arrives and every process lives, so that everyone hears of everything."""
        self.is_empty = self.spares_the_wires and not self._rates

    @classmethod
    def drawn(cls, world: World) -> Self:
        """A seed's own plan."""
        rng = world.rng
        if rng.random() < 0.05:
            return cls(world)  # a schedule without any fault shows that everything goes well by itself
        weather = Weather()
        if rng.random() < 0.5:
            weather = Weather(*(rng.uniform(0.005, 0.15) if rng.random() < 0.5 else 0.0 for _ in range(4)))
        rates = {
            step: tuple((rng.uniform(0.02, 0.25), kind) for kind in kinds if rng.random() < 0.6)
            for step, kinds in STEP_FAULTS.items()
            if rng.random() < 0.4
        }
        return cls(world, weather, rates, tuple(rng.choice(EVENTS) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))))

    def fate(self, step: str, who: str) -> str:
        """What goes wrong in this step, if anything does."""
        if (kind := self._doomed.pop(step, "")) != "":
            self._world.fault(f"{SUBJECTS[step]} {kind}", who, step)
            return kind
        chance = 1.0
        for rate, kind in self._rates.get(step, ()):
            if chance == 1.0:
                chance = self._random.random()
            chance -= rate
            if chance < 0:
                self._world.fault(f"{SUBJECTS[step]} {kind}", who, step)
                return kind
        return ""

    def doom(self, step: str, kind: str) -> None:
        """Have the next such step, whoever takes it, go wrong."""
        self._doomed[step] = kind

    def duration(self, step: str) -> float:
        return self._random.uniform(*DURATIONS[step])

    def end(self) -> None:
        self._rates.clear()
        self._doomed.clear()
