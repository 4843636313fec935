"""The demo: a policy trains in this process while vLLM servers, children of it, follow it over the bus.

Sampling never waits for an update and no update waits for sampling: while the learner is busy with one batch the
next is being drawn, and each publish meets requests in flight.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread
from anyio.streams.memory import MemoryObjectSendStream
from rich.console import Console

from bus.errors import BusError, InvalidInput, ServerFailed, UpdateFailed
from bus.events import NodeOutcome, Outcome, Peer, PhaseTimes
from tools.demo.display import Display
from tools.demo.fleet import running_servers
from tools.demo.learner import Learner
from tools.demo.probe import PROBE, PROBE_REPLY, ProbeResult, compare
from tools.demo.sampling import Group, Sampler
from tools.demo.summary import COMMITTED, FAILED, Run, VersionRow, phases_in_ms, summarise
from tools.demo.task import DESCRIPTION, Problem, split_problems
from tools.model import demo_model
from tools.report import write_report
from trainer_node import AdapterPublisher, Update

ADAPTER: Final = "policy"
GROUPS_PER_STEP: Final = 8
GROUP_SIZE: Final = 8
JOIN_TIMEOUT: Final = 60.0
FLEET_INTERVAL: Final = 1.0
"""Seconds between two looks at who is live."""

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What a user can choose: the model (None: the demo's own), how many servers and versions, where runs go."""

    model: str | None = None
    nodes: int = 2
    versions: int = 24
    out: Path = Path("runs")
    seed: int = 0


@dataclass(slots=True)
class _Record:
    """What the loop has seen so far."""

    rows: list[VersionRow] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    peers: set[Peer] = field(default_factory=set)

    @property
    def newest(self) -> int:
        """The newest committed version."""
        return max(row.version for row in self.rows if row.outcome == COMMITTED)


def run_demo(settings: DemoSettings) -> int:
    """Run the demo and return its exit code: 0, 1 for what failed, 2 for bad input, 128 + the signal that ended it.

    Everything goes into a new directory below `settings.out`, which `latest` in there then links to. Servers
    are taken down however the run ends.
    """
    console = Console()
    try:
        return anyio.run(_until_done_or_signalled, settings, console)
    except (BusError, BaseExceptionGroup) as failure:
        error = _first_bus_error(failure)
        if error is None:
            raise
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, InvalidInput) else 1


async def _until_done_or_signalled(settings: DemoSettings, console: Console) -> int:
    code = 0

    async def cancel_on_signal() -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                code = 128 + number
                console.print("stopping; taking the servers down")
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal)
        await _demo(settings, console)
        tasks.cancel_scope.cancel()
    return code


async def _demo(settings: DemoSettings, console: Console) -> None:
    started = time.monotonic()
    if settings.nodes < 1 or settings.versions < 2:
        raise InvalidInput("the demo needs at least 1 node and 2 versions; check --nodes and --versions")
    model = _checked_model(settings.model) if settings.model else str(await to_thread.run_sync(demo_model))
    directory = _new_run(settings.out)
    record = _Record()

    def reward_of(version: int) -> float | None:
        rewards = sampler.rewards.get(version)
        return statistics.fmean(rewards) if rewards else None

    with Display(console, reward_of) as display:
        display.stage(f"loading {model}")
        sampler = Sampler(ADAPTER, lambda: publisher.nodes, display.notice)
        learner = await to_thread.run_sync(
            lambda: Learner(model, seed=settings.seed, threads=os.cpu_count() or 1, steps=settings.versions - 1)
        )
        async with (
            AdapterPublisher(adapter=ADAPTER, bind="tcp://127.0.0.1:0", journal=directory / "journal.db") as publisher,
            running_servers(model, publisher.address, settings.nodes, directory, display.server),
            sampler,
        ):
            try:
                await publisher.wait_for_nodes(settings.nodes, timeout=JOIN_TIMEOUT)
            except TimeoutError as error:
                raise ServerFailed("the fleet", f"{error}; the servers' logs are in {directory}") from error
            display.stage(f"{settings.nodes} servers follow {publisher.address}; held-out problems, base model")
            training, held_out = split_problems(settings.seed)
            base_reward = await sampler.greedy_reward(model, held_out)
            loop = _Loop(settings, publisher, sampler, learner, display, record)
            await loop.run(training)
            display.stage("held-out problems, final policy; then the probe")
            final_reward = await sampler.greedy_reward(ADAPTER, held_out)
            probe = await _probe(sampler, learner, model, f"{ADAPTER}@{record.newest}")
        for row in record.rows:
            row.reward_mean = reward_of(row.version)
    summary = summarise(
        Run(
            model=model,
            nodes=sorted({peer.node for peer in record.peers}),
            task=DESCRIPTION,
            seconds=time.monotonic() - started,
            versions=record.rows,
            heldout_reward_base=base_reward,
            heldout_reward_final=final_reward,
            lags=record.lags,
            requests_sent=sampler.sent,
            requests_failed=sampler.failed,
            versions_seen=sampler.versions_seen,
            probe=probe,
        )
    )
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(summary, directory / "report.html")
    _print_end(console, summary, settings.out / "latest")


@dataclass(slots=True)
class _Loop:
    """Sample, learn, publish, until the wanted number of versions was published."""

    settings: DemoSettings
    publisher: AdapterPublisher
    sampler: Sampler
    learner: Learner
    display: Display
    record: _Record

    async def run(self, problems: tuple[Problem, ...]) -> None:
        await self._publish(1, lag=0.0)
        await self._look_at_fleet()
        draws = _endless(problems, random.Random(self.settings.seed))
        # The samplers each hold one finished group more than fits, so one batch is ahead of the learner, not two.
        ahead = max(0, GROUPS_PER_STEP - self.settings.nodes)
        send, groups = anyio.create_memory_object_stream[Group](ahead)
        async with self._watched_fleet(), anyio.create_task_group() as tasks, groups:
            for _ in range(self.settings.nodes):
                tasks.start_soon(self._keep_sampling, draws, send.clone())
            send.close()
            batch = [await groups.receive() for _ in range(GROUPS_PER_STEP)]
            for step in range(2, self.settings.versions + 1):
                self.display.stage(f"training {ADAPTER}, step {step - 1} of {self.settings.versions - 1}")
                newest = self.record.rows[-1].version
                lags = [newest - sample.version for group in batch for sample in group.samples]
                self.record.lags.extend(lags)
                await to_thread.run_sync(self.learner.step, batch)
                # Taking the next batch lets the samplers go on: their requests meet the update that follows.
                batch = [await groups.receive() for _ in range(GROUPS_PER_STEP)]
                await self._publish(step, lag=statistics.fmean(lags))
            while len(self.sampler.rewards[self.record.newest]) < GROUPS_PER_STEP * GROUP_SIZE:
                await groups.receive()

    async def _keep_sampling(self, problems: Iterator[Problem], groups: MemoryObjectSendStream[Group]) -> None:
        async with groups:
            try:
                while True:
                    await groups.send(await self.sampler.sample_group(next(problems), GROUP_SIZE))
            except anyio.BrokenResourceError:
                return  # the learner has enough

    async def _publish(self, step: int, *, lag: float) -> None:
        try:
            update = await self.publisher.publish(self.learner.model, step=step)
        except UpdateFailed as failure:
            if not self.record.rows:
                raise
            row = _failed_row(failure)
            self.display.notice(str(failure))
        else:
            row = _committed_row(update)
            for outcome in update.nodes:
                if outcome.outcome is not Outcome.ACTIVATED:
                    self.display.notice(_lost(update, outcome))
        row.lag = lag
        self.record.rows.append(row)
        self.display.version(row)

    @asynccontextmanager
    async def _watched_fleet(self) -> AsyncIterator[None]:
        """Ask again and again who is live, so that samplers use whoever joins and leave alone whoever is gone."""

        async def watch() -> None:
            while True:
                await anyio.sleep(FLEET_INTERVAL)
                await self._look_at_fleet()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()

    async def _look_at_fleet(self) -> None:
        live = {status.peer for status in await self.publisher.refresh_nodes()}
        if self.record.peers:
            for peer in sorted(live - self.record.peers):
                self.display.notice(f"{peer.node} joined the fleet")
        self.record.peers |= live


async def _probe(sampler: Sampler, learner: Learner, model: str, newest: str) -> ProbeResult:
    """Compare the reply's tokens: those of the question are unlikely to both, and their rounding tells nothing."""
    tokens, reply = await sampler.conversation_tokens(model, PROBE, PROBE_REPLY)
    peers = list(sampler.endpoints(newest))
    policy, rounded = await to_thread.run_sync(learner.logprobs, tokens)
    of_reply = slice(reply - 1, None)  # the first token has no log-probability
    return compare(
        policy[of_reply],
        rounded[of_reply],
        {peer.node: (await sampler.prompt_logprobs(peer, newest, tokens))[of_reply] for peer in peers},
        {peer.node: (await sampler.prompt_logprobs(peer, model, tokens))[of_reply] for peer in peers},
    )


def _committed_row(update: Update) -> VersionRow:
    return VersionRow(
        version=update.version,
        outcome=COMMITTED,
        nodes={outcome.node: str(outcome.outcome) for outcome in update.nodes},
        phases_ms=phases_in_ms(update.phases),
        bytes=update.nbytes,
        tensors=update.tensors,
        digest=update.digest,
    )


def _failed_row(failure: UpdateFailed) -> VersionRow:
    return VersionRow(
        version=failure.version,
        outcome=FAILED,
        nodes={failure.node: f"{failure.phase}: {failure.reason}"} if failure.node else {},
        phases_ms=phases_in_ms(PhaseTimes(0.0, 0.0, 0.0, 0.0, failure.seconds)),
        detail=failure.detail,
    )


def _lost(update: Update, outcome: NodeOutcome) -> str:
    detail = f" ({outcome.detail})" if outcome.detail else ""
    return (
        f"{outcome.node} was {outcome.outcome} in phase {outcome.phase} of {ADAPTER}@{update.version}{detail}; "
        f"the others serve it, {update.seconds:.1f} s after publish"
    )


def _endless(problems: tuple[Problem, ...], draw: random.Random) -> Iterator[Problem]:
    """All problems in random order, again and again."""
    for _ in itertools.count():
        yield from draw.sample(problems, len(problems))


def _checked_model(model: str) -> str:
    """The model as given, if it is a model directory or can be the name of one on a hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(f"{model} is no model directory (it has no config.json); check --model")
        return str(path)
    if not _HUB_ID.fullmatch(model):
        raise InvalidInput(f"{model} does not exist; give --model a model directory or a hub name like owner/model")
    return model


def _new_run(out: Path) -> Path:
    """A fresh directory for this run, with the link `latest` pointing at it."""
    directory = out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    link = out / f".latest-{directory.name}"
    try:
        directory.mkdir(parents=True)
        link.symlink_to(directory.name)
        link.replace(out / "latest")
    except OSError as error:
        raise InvalidInput(f"cannot write the run to {out} ({error.strerror or error}); check --out") from error
    return directory


def _print_end(console: Console, summary: Mapping[str, Any], latest: Path) -> None:
    committed = sum(row["outcome"] == COMMITTED for row in summary["versions"])
    probe, requests = summary["probe"], summary["requests"]
    lines = (
        f"{committed} of {len(summary['versions'])} versions committed in {summary['seconds']:.0f} s; "
        f"{requests['sent']} requests, {requests['failed']} failed; lag {summary['lag']['mean']:.2f} on average",
        f"reward {summary['reward_first5']:.3f} (first 5) -> {summary['reward_last5']:.3f} (last 5); "
        f"held out {summary['heldout_reward_base']:.3f} -> {summary['heldout_reward_final']:.3f}",
        f"probe: {probe['max_abs_logprob_diff_trained']:.4f} nats from the trained model, "
        f"{probe['max_abs_logprob_diff_base']:.4f} from the base model, "
        f"{probe['max_abs_logprob_diff_rounding']:.4f} by rounding alone; "
        f"nodes {'agree' if probe['nodes_agree'] else 'DIFFER'}",
        f"report: {latest / 'report.html'}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _first_bus_error(failure: BaseException) -> BusError | None:
    """The first of our errors in an exception or a group of them, or None if something else is in there."""
    if isinstance(failure, BaseExceptionGroup):
        found = [_first_bus_error(inner) for inner in failure.exceptions]
        return found[0] if all(found) else None
    return failure if isinstance(failure, BusError) else None
