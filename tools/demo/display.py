"""What a person sees while the demo runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bus.events import Outcome
from tools.demo.summary import COMMITTED, VersionRow

_PHASES: Final = ("ready", "transfer", "load", "commit", "total")
_LINES_BESIDE_TABLE: Final = 14
_NOTICES_SHOWN: Final = 3


class Display:
    """The state of the run as shown; use it as a context manager, which leaves the finished table behind.

    `reward` gives the mean reward of a version's samples so far, or None.
    """

    def __init__(self, console: Console, reward: Callable[[int], float | None]) -> None:
        self._console = console
        self._reward = reward
        self._servers: dict[str, str] = {}
        self._rows: list[VersionRow] = []
        self._notices: list[str] = []
        self._stage = ""
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            for notice in self._notices:
                self._console.print(Text(f"! {notice}", style="yellow"))
            if self._rows:
                self._console.print(self._table(len(self._rows)))
        elif self._rows:
            self._console.print(self._line(self._rows[-1]), soft_wrap=True)

    def stage(self, text: str) -> None:
        """Say what the run as a whole is doing."""
        self._stage = text
        self._say(text)

    def server(self, node: str, text: str) -> None:
        """Say what a server is doing; on a terminal in place, elsewhere only when it has changed."""
        if self._servers.get(node) != text and not text.startswith("starting"):
            self._say(f"{node} {text}")
        self._servers[node] = text

    def notice(self, text: str) -> None:
        """Say something a person should not miss."""
        self._notices.append(text)
        self._say(f"! {text}")

    def version(self, row: VersionRow) -> None:
        """Add a version; in plain lines it shows when the next one comes, for by then its reward is known."""
        if self._rows:
            self._say(self._line(self._rows[-1]))
        self._rows.append(row)

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(Text(text), soft_wrap=True)

    def _line(self, row: VersionRow) -> str:
        phases = " ".join(f"{name} {row.phases_ms[name]:.0f}" for name in _PHASES)
        reward, lag = self._shown(row), f"{row.lag:.1f}"
        return f"version {row.version:>3} {row.outcome}  reward {reward}  lag {lag}  ms: {phases}  nodes {_nodes(row)}"

    def _shown(self, row: VersionRow) -> str:
        reward = self._reward(row.version)
        return "  -  " if reward is None else f"{reward:.3f}"

    def _render(self) -> RenderableType:
        servers = Table.grid(padding=(0, 2))
        for node, text in self._servers.items():
            servers.add_row(Text(node, style="bold"), Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        parts: list[RenderableType] = [Text(self._stage, style="bold cyan"), servers]
        if self._rows:
            parts.append(self._table(max(3, self._console.height - _LINES_BESIDE_TABLE)))
        parts.extend(Text(f"! {notice}", style="yellow") for notice in self._notices[-_NOTICES_SHOWN:])
        return Group(*parts)

    def _table(self, rows: int) -> Table:
        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, caption="phases in milliseconds, lag in versions", caption_justify="left"
        )
        for heading in ("version", "reward", "lag", *_PHASES):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("nodes")
        for row in self._rows[-rows:]:
            table.add_row(
                f"policy@{row.version}",
                Text(self._shown(row), style="bold green"),
                f"{row.lag:.1f}",
                *(f"{row.phases_ms[name]:.0f}" for name in _PHASES),
                _nodes(row),
                style="" if row.outcome == COMMITTED else "red",
            )
        return table


def _nodes(row: VersionRow) -> str:
    """How many nodes serve the version, and what became of the others."""
    serving = [node for node, outcome in row.nodes.items() if outcome == Outcome.ACTIVATED]
    others = [f"{node} {outcome}" for node, outcome in row.nodes.items() if outcome != Outcome.ACTIVATED]
    return ", ".join([f"{len(serving)} of {len(row.nodes)}" if serving else row.outcome, *others])
