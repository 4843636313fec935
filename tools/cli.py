"""The command line: each command parses, calls one function, and turns errors into one sentence and an exit code.

Exit codes: 0 done, 1 refused or failed, 2 something given cannot be used, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from bus.controller import DEFAULT_BIND
from bus.errors import BusError, InvalidInput

app = typer.Typer(
    name="adapterbus",
    help="The event-driven bus between a LoRA trainer and its fleet of vLLM servers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Bus = Annotated[str, typer.Option("--bus", help="The controller's address.", envvar="ADAPTERBUS_ADDRESS")]


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="A model directory or hub id; by default SmolLM2-135M-Instruct.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many vLLM servers to start.")] = 2,
    versions: Annotated[int, typer.Option(min=1, help="How many versions to publish.")] = 24,
    out: Annotated[Path, typer.Option(help="Where runs are written; `latest` links to the newest.")] = Path("runs"),
) -> None:
    """Train a LoRA policy while vLLM servers on this machine follow it, and write a report."""
    from tools.demo.run import DemoSettings, run_demo

    raise typer.Exit(run_demo(DemoSettings(model=model, nodes=nodes, versions=versions, out=out)))


@app.command()
def controller(
    bind: Annotated[str, typer.Option(help="Where to listen; port 0 lets the system pick.")] = DEFAULT_BIND,
    journal: Annotated[Path, typer.Option(help="The journal file; it is made if it is not there.")] = Path(
        "journal.db"
    ),
) -> None:
    """Run a controller of its own; trainers and nodes are given its address."""
    from bus.controller import Controller

    async def serve() -> None:
        async with Controller.open(bind, journal=journal) as running:
            Console().print(f"controller at [bold]{running.address}[/], journal {journal}; Ctrl-C stops it")
            await anyio.sleep_forever()

    anyio.run(serve)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The base model: a directory or a hub id.")],
    bus: Annotated[
        str | None, typer.Option("--bus", help="The controller to follow.", envvar="ADAPTERBUS_ADDRESS")
    ] = None,
    node: Annotated[str | None, typer.Option(help="This node's name on the bus; by default host and process.")] = None,
) -> None:
    """Start a stock vLLM OpenAI server that follows the bus. Any other flag goes to vLLM as it is."""
    from rollout_node.serve import serve as become_server

    become_server(model, bus=bus, node=node, vllm_args=context.args)


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="A saved PEFT adapter: what `save_pretrained` wrote.")],
    bus: Bus = DEFAULT_BIND,
    adapter: Annotated[str | None, typer.Option(help="Its name on the servers; by default the directory's.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Where its base model is, if not where the adapter says.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the fleet.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Publish a saved PEFT adapter to a running fleet."""
    from tools.push import push_directory

    push_directory(directory, address=bus, adapter=adapter, base_model=base_model, timeout=timeout, as_json=as_json)


@app.command()
def status(
    bus: Bus = DEFAULT_BIND,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show nodes, adapters, versions and lag."""
    from tools.status import ask, rendered, summarised

    report = anyio.run(ask, bus)
    if as_json:
        typer.echo(json.dumps(summarised(report), indent=2))
    else:
        Console().print(rendered(report, bus))


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many schedules to play; one shows its whole trace.")] = 1000,
    start: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="How many rollout nodes each schedule has.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play the bus under injected faults, seed by seed, and check that its invariants hold."""
    from tools.simulation.run import run_simulation, summarised, told

    report = run_simulation(seeds, start, nodes)
    typer.echo(json.dumps(summarised(report), indent=2) if as_json else told(report))
    raise typer.Exit(1 if report.violating else 0)


def main() -> None:
    """Run the command line; every foreseen error is one sentence on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except (BusError, TimeoutError) as error:
        typer.echo(f"adapterbus: {error}", err=True)
        sys.exit(2 if isinstance(error, InvalidInput) else 1)
