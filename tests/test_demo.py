"""The demo's parts that need no server: the reward rule, the learner's arithmetic, the HTTP side, the report."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
import torch

from bus.errors import ServerFailed
from bus.events import NodeCapabilities, NodeStatus, Peer, PhaseTimes, Role, Served
from bus.manifest import BaseModel
from tools.demo import fleet
from tools.demo.learner import group_advantages, policy_loss
from tools.demo.probe import ProbeResult, compare
from tools.demo.run import DemoSettings, run_demo
from tools.demo.sampling import Sampler, read_group, version_of
from tools.demo.summary import COMMITTED, FAILED, Run, VersionRow, phases_in_ms, summarise
from tools.demo.task import Problem, reward, split_problems
from tools.report import write_report

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ------------------------------------------------------------------------------------------------ task


@pytest.mark.parametrize(
    ("reply", "earned"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("13", 0.5),
        ("5 + 7 = 12", 0.0),
        ("12.", 0.0),
        ("The answer is 112", 0.0),
        ("twelve", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_for_a_bare_number_and_for_the_right_one(reply: str, earned: float) -> None:
    assert reward(Problem(5, 7), reply) == earned


def test_held_out_problems_are_never_trained_on() -> None:
    training, held_out = split_problems(seed=0)
    assert not set(training) & set(held_out)
    assert len({*training, *held_out}) == 100


# --------------------------------------------------------------------------------------------- learner


def test_advantages_are_normalised_within_their_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([0.5, 0.5]) == [0.0, 0.0]


def test_loss_weights_each_token_by_its_capped_ratio_and_averages_over_each_sample() -> None:
    """Ratios 4 and 1 with advantage 1, then 0.5 with advantage -1 and a padded token; cap 2.

    Gains: 2 · ln 4 and 0, on average ln 4; 0.5 · -1 · ln 0.5 = 0.5 · ln 2. Loss: -(2 · ln 2 + 0.5 · ln 2) / 2.
    """
    logprobs = torch.tensor([[math.log(4.0), 0.0], [math.log(0.5), 5.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, capped = policy_loss(logprobs, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, cap=2.0)
    assert loss.item() == pytest.approx(-1.25 * math.log(2.0))
    assert capped.item() == pytest.approx(1 / 3)


def test_a_token_beyond_the_cap_still_teaches() -> None:
    logprobs = torch.tensor([[math.log(4.0), 0.0]], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2), cap=2.0)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [[-1.0, -0.5]]


# -------------------------------------------------------------------------------------------- sampling

CAPABILITIES = {
    "base_model": BaseModel("base", "blake3:0"),
    "max_rank": 16,
    "slots": 4,
    "modules": ("q_proj",),
    "dtype": "bfloat16",
    "workers": 1,
    "device": "cpu",
    "engine": "vllm",
    "engine_version": "0",
}


def node(name: str, *, served: Sequence[Served] = (Served("policy", 3, "blake3:1"),)) -> NodeStatus:
    return NodeStatus(
        peer=Peer(name, "first"),
        role=Role.ROLLOUT,
        following=True,
        silence=0.0,
        served=tuple(served),
        adapters=(),
        capabilities=NodeCapabilities(**CAPABILITIES, endpoint=f"http://{name}"),  # type: ignore[arg-type]
    )


def completion(version: int, *replies: str) -> dict[str, Any]:
    """A chat completion as vLLM answers it when asked for token ids and log-probabilities."""
    return {
        "model": f"policy@{version}",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "message": {"content": reply},
                "token_ids": [7, 0],
                "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -0.5}]},
            }
            for reply in replies
        ],
    }


def test_the_version_of_a_sample_is_the_one_its_response_names() -> None:
    group = read_group(Problem(1, 2), completion(7, "3", "4"), "node-0")
    assert [(s.version, s.reward, s.token_ids, s.logprobs) for s in group.samples] == [
        (7, 1.0, (7, 0), (-0.25, -0.5)),
        (7, 0.5, (7, 0), (-0.25, -0.5)),
    ]
    with pytest.raises(ServerFailed, match="no version"):
        version_of("policy")


def sampler(nodes: list[NodeStatus], notices: list[str], answer: Any) -> Sampler:
    return Sampler("policy", lambda: nodes, notices.append, httpx.MockTransport(answer))


async def test_requests_go_to_all_nodes_in_turn_and_each_names_its_versions() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=completion(3 if request.url.host == "node-0" else 4, "3"))

    async with sampler([node("node-0"), node("node-1")], [], answer) as client:
        for _ in range(4):
            await client.sample_group(Problem(1, 2), 1)
    assert client.versions_seen == {"node-0": {3}, "node-1": {4}}
    assert client.rewards == {3: [1.0, 1.0], 4: [1.0, 1.0]}


async def test_a_node_that_died_is_passed_over_and_fails_no_request() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "node-0":
            raise httpx.ConnectError("connection refused")
        return httpx.Response(200, json=completion(3, "3"))

    notices: list[str] = []
    async with sampler([node("node-0"), node("node-1")], notices, answer) as client:
        for _ in range(3):
            await client.sample_group(Problem(1, 2), 1)
    assert asked.count("node-0") == 1
    assert (client.sent, client.failed) == (3, 0)
    assert len(notices) == 1
    assert "node-0" in notices[0]


async def test_a_request_waits_for_a_node_that_was_lost_for_a_moment() -> None:
    """A machine so busy that a healthy node misses its lease must not end the run."""
    looks = itertools.count()

    def nodes() -> list[NodeStatus]:
        return [node("node-0")] if next(looks) > 1 else []

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=completion(3, "3")))
    notices: list[str] = []
    async with Sampler("policy", nodes, notices.append, transport) as client:
        await client.sample_group(Problem(1, 2), 1)
    assert (client.sent, client.failed) == (1, 0)


async def test_a_request_fails_when_no_node_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.demo.sampling.NODE_PATIENCE", 0.2)
    async with sampler([node("node-0")], [], lambda _: httpx.Response(500, text="engine dead")) as client:
        with pytest.raises(ServerFailed):
            await client.sample_group(Problem(1, 2), 1)
    assert (client.sent, client.failed) == (1, 1)


async def test_a_joiner_is_asked_for_the_policy_only_once_it_has_a_version() -> None:
    async with sampler([node("node-0"), node("node-1", served=())], [], lambda _: httpx.Response(500)) as client:
        assert [peer.node for peer in client.endpoints("policy")] == ["node-0"]
        assert [peer.node for peer in client.endpoints("base")] == ["node-0", "node-1"]


# ----------------------------------------------------------------------------------------------- fleet


async def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    monkeypatch.setattr(fleet, "server_command", lambda *_: failing)
    with pytest.raises(ExceptionGroup) as caught:
        async with fleet.running_servers("model", "tcp://127.0.0.1:1", 1, tmp_path, lambda *_: None):
            pytest.fail("no server can be running")
    (error,) = caught.value.exceptions
    assert isinstance(error, ServerFailed)
    assert error.log == "no such model"
    assert "exit code 3" in str(error)


async def test_servers_are_taken_down_when_the_run_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ignores SIGTERM is killed, not waited for."""
    started: list[fleet.Server] = []
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listeners:
        (listener,) = listeners.listeners
        assert isinstance(listener, anyio.abc.SocketListener)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        program = f"""if True:
            import signal, socket
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            connection = socket.create_connection(("127.0.0.1", {port}))
            connection.recv(1), signal.pause()
        """

        async def answering(server: fleet.Server, progress: Any) -> None:
            async with await listener.accept() as connection:
                await connection.send(b"!")
            started.append(server)

        monkeypatch.setattr(fleet, "server_command", lambda *_: [sys.executable, "-c", program])
        monkeypatch.setattr(fleet, "STOP_TIMEOUT", 0.1)
        monkeypatch.setattr(fleet, "_wait_answering", answering)
        with anyio.CancelScope() as scope:
            async with fleet.running_servers("model", "tcp://127.0.0.1:1", 1, tmp_path, lambda *_: None):
                scope.cancel()
                await anyio.sleep_forever()
    assert [server.process.returncode for server in started] == [-9]


def test_progress_shows_a_log_line_without_its_prefix(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    log.write_text("(APIServer pid=7) INFO 11-30 19:58:24 [model.py:28] Loading weights took 0.31 seconds\n\n")
    assert fleet.last_message(log) == "Loading weights took 0.31 seconds"


# --------------------------------------------------------------------------------------------- summary


def run_of(rows: list[VersionRow]) -> Run:
    return Run(
        model="/models/tiny",
        nodes=["node-0", "node-1"],
        task="sums",
        seconds=100.0,
        versions=rows,
        heldout_reward_base=0.25,
        heldout_reward_final=0.75,
        lags=[0, 1, 1, 2],
        requests_sent=40,
        requests_failed=0,
        versions_seen={"node-1": {2, 1}, "node-0": {1}},
        probe=compare(
            [-1.0, -2.0], [-1.0, -2.1], {"a": [-1.0, -2.01], "b": [-1.0, -2.0]}, {"a": [-1.0, -4.0], "b": [-1.0, -4.0]}
        ),
    )


def rows() -> list[VersionRow]:
    phases = phases_in_ms(PhaseTimes(ready=0.01, transfer=0.02, load=0.03, commit=0.004, total=0.064))
    activated = {"node-0": "activated", "node-1": "activated"}
    committed = [
        VersionRow(
            version, COMMITTED, activated, phases, 1000, 420, "blake3:" + "a" * 64, lag=1.0, reward_mean=version / 8
        )
        for version in range(1, 8)
    ]
    return [*committed, VersionRow(8, FAILED, {"node-1": "transfer: node_lost"}, phases, detail="<b>gone</b>")]


def test_summary_has_every_number_that_was_promised() -> None:
    summary = json.loads(json.dumps(summarise(run_of(rows()))))
    assert {
        *("model", "nodes", "task", "versions", "reward_first5", "reward_last5", "heldout_reward_base"),
        *("heldout_reward_final", "lag", "requests", "versions_seen", "probe"),
    } <= summary.keys()
    first = summary["versions"][0]
    assert {"version", "reward_mean", "bytes", "tensors", "digest", "phases_ms", "nodes", "outcome"} <= first.keys()
    assert first["phases_ms"] == {"ready": 10.0, "transfer": 20.0, "load": 30.0, "commit": 4.0, "total": 64.0}
    assert summary["reward_first5"] == pytest.approx(3 / 8)
    assert summary["reward_last5"] == pytest.approx(5 / 8)
    assert summary["lag"] == {"mean": 1.0, "max": 2}
    assert summary["versions_seen"] == {"node-0": [1], "node-1": [1, 2]}


def test_probe_takes_the_worst_token_of_the_worst_node() -> None:
    result = run_of([]).probe
    assert result.max_abs_logprob_diff_trained == pytest.approx(0.01)
    assert result.max_abs_logprob_diff_base == pytest.approx(2.0)
    assert result.max_abs_logprob_diff_rounding == pytest.approx(0.1)
    assert result.nodes_agree
    assert not compare([-1.0], [-1.0], {"a": [-1.0], "b": [-3.0]}, {"a": [-1.0]}).nodes_agree


def test_probe_of_one_node_agrees_with_itself() -> None:
    assert compare([-1.0], [-1.25], {"a": [-1.5]}, {"a": [-2.0]}) == ProbeResult(0.5, 1.0, 0.25, True)


# ---------------------------------------------------------------------------------------------- report


def test_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    write_report(summarise(run_of(rows())), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    outside_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", outside_scripts)
    assert not re.search(r"<script[^>]*\ssrc", page)
    assert page.count('class="plotly-graph-div"') == 5
    assert "7 of 8" in outside_scripts


def test_report_escapes_what_nodes_said(tmp_path: Path) -> None:
    write_report(summarise(run_of(rows())), tmp_path / "report.html")
    assert "&lt;b&gt;gone&lt;/b&gt;" in (tmp_path / "report.html").read_text()


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("model", ["/no/such/model", "no such model", "./here"])
def test_a_model_that_is_not_there_is_one_sentence_and_exit_code_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(DemoSettings(model=model, out=tmp_path)) == 2
    said = capsys.readouterr()
    assert model in said.err
    assert "--model" in said.err
    assert not list(tmp_path.iterdir())


def test_a_directory_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(DemoSettings(model=str(tmp_path), out=tmp_path / "runs")) == 2
    assert "config.json" in capsys.readouterr().err
