"""The report of a demo run: one page that needs no network, from the data of `summary.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_TEMPLATE: Final = "report_template.html"
_PHASES: Final = {
    "ready": ("#7aa6f0", "every node checks the manifest"),
    "transfer": ("#3f6fd1", "the bytes move"),
    "load": ("#f0a35e", "nodes build the adapter and fill a slot"),
    "commit": ("#4fb286", "the name flips"),
}
_POLICY: Final = "#4fb286"
_BASE: Final = "#9aa3b2"
_ACCENT: Final = "#3f6fd1"
_GRID: Final = "rgba(128,136,150,0.18)"
_LOOK: Final[dict[str, Any]] = {
    "template": "none",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 8, "r": 8, "t": 36, "b": 8},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    "dragmode": False,
}
"""The look of all charts; the colour of their text is the page's, so that it follows light and dark."""


def write_report(summary: Mapping[str, Any], path: Path) -> None:
    """Write the page for a summary (the data of `summary.json`); it holds its scripts and styles itself."""
    template = resources.files(__package__).joinpath(_TEMPLATE).read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["megabytes"] = lambda size: f"{size / 1e6:.1f} MB"
    page = environment.from_string(template).render(
        summary=summary,
        facts=_facts(summary),
        phases=_PHASES,
        plotly=get_plotlyjs(),
        charts={name: _html(figure) for name, figure in _figures(summary).items()},
    )
    path.write_text(page, encoding="utf-8")


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that the page states in words."""
    committed = [row for row in summary["versions"] if row["outcome"] == "committed"]
    probe = summary["probe"]
    trained = probe["max_abs_logprob_diff_trained"]
    return {
        "committed": len(committed),
        "published": len(summary["versions"]),
        "median_ms": statistics.median([row["phases_ms"]["total"] for row in committed]) if committed else 0.0,
        "bytes": max((row["bytes"] for row in committed), default=0),
        "tensors": max((row["tensors"] for row in committed), default=0),
        "newest": max((row["version"] for row in committed), default=0),
        "closer": probe["max_abs_logprob_diff_base"] / trained if trained else float("inf"),
    }


def _figures(summary: Mapping[str, Any]) -> dict[str, go.Figure]:
    rows = summary["versions"]
    versions = [row["version"] for row in rows]
    return {
        "reward": _reward(summary, versions),
        "phases": _phase_bars(rows, versions),
        "lag": _lag(rows, versions),
        "nodes": _nodes(summary, versions),
        "probe": _probe(summary["probe"]),
    }


def _reward(summary: Mapping[str, Any], versions: Sequence[int]) -> go.Figure:
    figure = go.Figure()
    for name, value, colour in (
        ("held-out problems, base model", summary["heldout_reward_base"], _BASE),
        ("held-out problems, final policy", summary["heldout_reward_final"], _ACCENT),
    ):
        figure.add_scatter(
            x=[versions[0], versions[-1]],
            y=[value, value],
            name=name,
            mode="lines",
            line={"color": colour, "dash": "dash", "width": 2},
            hovertemplate=f"{value:.3f}<extra>{name}</extra>",
        )
    figure.add_scatter(
        x=versions,
        y=[row["reward_mean"] for row in summary["versions"]],
        name="samples of each version",
        mode="lines+markers",
        line={"color": _POLICY, "width": 3},
        marker={"size": 7},
        hovertemplate="version %{x}: %{y:.3f}<extra></extra>",
    )
    return _styled(figure, versions, y="mean reward", height=360, y_range=(0, 1.03))


def _phase_bars(rows: Sequence[Mapping[str, Any]], versions: Sequence[int]) -> go.Figure:
    figure = go.Figure()
    for phase, (colour, _) in _PHASES.items():
        figure.add_bar(
            x=versions,
            y=[row["phases_ms"][phase] for row in rows],
            name=phase,
            marker={"color": colour},
            hovertemplate=f"{phase} %{{y:.0f}} ms<extra>version %{{x}}</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    return _styled(figure, versions, y="milliseconds", height=340)


def _lag(rows: Sequence[Mapping[str, Any]], versions: Sequence[int]) -> go.Figure:
    figure = go.Figure()
    figure.add_bar(
        x=versions,
        y=[row["lag"] for row in rows],
        marker={"color": _ACCENT},
        hovertemplate="trained into version %{x}: %{y:.2f} versions old<extra></extra>",
    )
    figure.update_layout(bargap=0.25, showlegend=False)
    return _styled(figure, versions, y="versions", height=260)


def _nodes(summary: Mapping[str, Any], versions: Sequence[int]) -> go.Figure:
    seen = summary["versions_seen"]
    nodes = sorted({*summary["nodes"], *seen}, reverse=True)
    figure = go.Figure()
    figure.add_scatter(
        x=[version for node in nodes for version in seen.get(node, [])],
        y=[node for node in nodes for _ in seen.get(node, [])],
        mode="markers",
        marker={"symbol": "square", "size": 13, "color": _POLICY},
        hovertemplate="%{y} answered with version %{x}<extra></extra>",
    )
    figure.update_layout(showlegend=False)
    styled = _styled(figure, versions, y="", height=110 + 36 * len(nodes))
    styled.update_yaxes(categoryorder="array", categoryarray=nodes, rangemode="normal", range=[-0.6, len(nodes) - 0.4])
    return styled


def _probe(probe: Mapping[str, Any]) -> go.Figure:
    values = [probe[f"max_abs_logprob_diff_{kind}"] for kind in ("rounding", "base", "trained")]
    figure = go.Figure()
    figure.add_bar(
        x=values,
        y=["rounding alone", "base model", "trained policy"],
        orientation="h",
        marker={"color": [_BASE, _BASE, _POLICY]},
        text=[f"{value:.3g} nats" for value in values],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.update_layout(**_LOOK, height=190, showlegend=False, bargap=0.4)
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 8})
    figure.update_xaxes(visible=False, range=[0, max(values) * 1.45 or 1], fixedrange=True)
    figure.update_yaxes(automargin=True, showgrid=False, ticksuffix="  ", fixedrange=True)
    return figure


def _styled(
    figure: go.Figure, versions: Sequence[int], *, y: str, height: int, y_range: tuple[float, float] | None = None
) -> go.Figure:
    """A chart over versions, in the look that all share."""
    figure.update_layout(**_LOOK, height=height)
    figure.update_xaxes(
        title="version",
        range=[versions[0] - 0.7, versions[-1] + 0.7],
        automargin=True,
        showgrid=False,
        zeroline=False,
        tickformat="d",
        fixedrange=True,
    )
    figure.update_yaxes(
        title=y, automargin=True, gridcolor=_GRID, zeroline=False, rangemode="tozero", range=y_range, fixedrange=True
    )
    return figure


def _html(figure: go.Figure) -> str:
    html: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return html
