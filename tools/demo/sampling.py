"""Samples over the servers' ordinary HTTP API, on all live nodes in turn. Knows no torch and no training.

Which version made a sample is read from the response's `model` field (`policy@7`), never assumed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import anyio
import httpx

from bus.errors import ServerFailed
from bus.events import NodeStatus, Peer
from tools.demo.task import MAX_ANSWER_TOKENS, Problem, reward

REQUEST_TIMEOUT: Final = 60.0
"""Seconds for one whole request; a server without a token for this long counts as gone."""

_EXACT: Final = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Overrides a model's own generation config: the reported log-probabilities must be those sampled from."""


NODE_PATIENCE: Final = 30.0
"""Seconds that a request waits for a node that can answer it, should none be live."""

NODE_INTERVAL: Final = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply: its tokens (the end token included), the log-probability each was drawn with, what it earned."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    reward: float
    version: int
    node: str


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one problem, all drawn by one request and so by one version."""

    problem: Problem
    samples: tuple[Sample, ...]


class Sampler:
    """An HTTP client of the whole fleet; use it as an async context manager.

    `nodes` gives the live rollout nodes as the controller sees them; one that joins is used from its first head
    on. A node that does not answer is left alone until it comes back under a new incarnation, its request goes to
    the next node, and `notice` is told. A request counts as failed only when no node could answer it.
    """

    def __init__(
        self,
        adapter: str,
        nodes: Callable[[], Sequence[NodeStatus]],
        notice: Callable[[str], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.sent = 0
        self.failed = 0
        self.versions_seen: defaultdict[str, set[int]] = defaultdict(set)
        self.rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._adapter = adapter
        self._nodes = nodes
        self._notice = notice
        self._silent: set[Peer] = set()
        self._turn = itertools.count()
        self._client = httpx.AsyncClient(timeout=REQUEST_TIMEOUT, trust_env=False, transport=transport)

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await self._client.aclose()

    def endpoints(self, model: str) -> dict[Peer, str]:
        """The base URL of every live node that can answer for a model name, in a stable order.

        The policy is asked only of nodes that have a version of it; the base model of all.
        """
        return {
            status.peer: status.capabilities.endpoint
            for status in sorted(self._nodes(), key=lambda status: status.peer)
            if status.capabilities is not None
            and status.capabilities.endpoint
            and status.peer not in self._silent
            and (
                model.partition("@")[0] != self._adapter or any(held.adapter == self._adapter for held in status.served)
            )
        }

    async def sample_group(self, problem: Problem, size: int) -> Group:
        """Draw `size` replies to a problem from the policy as it is served now; raises `ServerFailed`."""
        request = _chat(self._adapter, problem, temperature=1.0, n=size)
        peer, answer = await self._ask("/v1/chat/completions", request)
        group = read_group(problem, answer, peer.node)
        self.versions_seen[peer.node].update(sample.version for sample in group.samples)
        for sample in group.samples:
            self.rewards[sample.version].append(sample.reward)
        return group

    async def greedy_reward(self, model: str, problems: Sequence[Problem]) -> float:
        """The mean reward of the most likely reply to each problem; raises `ServerFailed`."""
        rewards: list[float] = []
        limiter = anyio.CapacityLimiter(8)

        async def one(problem: Problem) -> None:
            async with limiter:
                _, answer = await self._ask("/v1/chat/completions", _chat(model, problem, temperature=0.0, n=1))
            rewards.append(reward(problem, answer["choices"][0]["message"]["content"] or ""))

        async with anyio.create_task_group() as tasks:
            for problem in problems:
                tasks.start_soon(one, problem)
        return sum(rewards) / len(rewards)

    async def prompt_logprobs(self, peer: Peer, model: str, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, on one node; raises `ServerFailed`."""
        request = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        _, answer = await self._ask("/v1/completions", request, only=peer)
        places = answer["choices"][0]["prompt_logprobs"][1:]
        return [float(place[str(token)]["logprob"]) for token, place in zip(token_ids[1:], places, strict=True)]

    async def conversation_tokens(self, model: str, problem: Problem, reply: str) -> tuple[list[int], int]:
        """The token ids of a problem and a reply to it, in the model's chat format, and where the reply begins.

        Raises `ServerFailed`.
        """
        asked = _messages(problem)
        whole = [*asked, {"role": "assistant", "content": reply}]
        tokens = await self._tokens(model, whole, add_generation_prompt=False)
        return tokens, len(await self._tokens(model, asked, add_generation_prompt=True))

    async def _tokens(self, model: str, messages: Sequence[Mapping[str, str]], **how: bool) -> list[int]:
        _, answer = await self._ask("/tokenize", {"model": model, "messages": list(messages), **how})
        return [int(token) for token in answer["tokens"]]

    async def _ask(self, path: str, request: Mapping[str, Any], only: Peer | None = None) -> tuple[Peer, Any]:
        self.sent += 1
        tried: set[Peer] = set()
        deadline = anyio.current_time() + NODE_PATIENCE
        while anyio.current_time() < deadline:
            candidates = [
                (peer, url)
                for peer, url in self.endpoints(request["model"]).items()
                if peer not in tried and only in (None, peer)
            ]
            if not candidates:
                await anyio.sleep(NODE_INTERVAL)  # one that was starved of its lease joins again within seconds
                continue
            peer, url = candidates[next(self._turn) % len(candidates)]
            tried.add(peer)
            try:
                response = await self._client.post(url.rstrip("/") + path, json=request)
            except httpx.TransportError as error:
                self._silence(peer, str(error) or type(error).__name__)
                continue
            if response.is_server_error:
                self._silence(peer, f"it answered {response.status_code}: {response.text[:200]}")
                continue
            if response.is_error:
                self.failed += 1
                raise ServerFailed(peer.node, f"it refused a request ({response.status_code}): {response.text[:300]}")
            return peer, response.json()
        self.failed += 1
        raise ServerFailed(only.node if only else "the fleet", f"no live node answered a request to {path}")

    def _silence(self, peer: Peer, why: str) -> None:
        if peer not in self._silent:
            self._silent.add(peer)
            self._notice(f"{peer.node} does not answer ({why}); its requests go to the other nodes")


def read_group(problem: Problem, answer: Mapping[str, Any], node: str) -> Group:
    """The group in a chat completion's answer (JSON as vLLM gives it, with token ids and log-probabilities)."""
    prompt_ids = tuple(answer["prompt_token_ids"])
    version = version_of(answer["model"])
    return Group(
        problem,
        tuple(
            Sample(
                prompt_ids,
                tuple(choice["token_ids"]),
                tuple(float(token["logprob"]) for token in choice["logprobs"]["content"]),
                choice["message"]["content"] or "",
                reward(problem, choice["message"]["content"] or ""),
                version,
                node,
            )
            for choice in answer["choices"]
        ),
    )


def version_of(model: str) -> int:
    """The version in a response's model name, `policy@7`; raises `ServerFailed` if it names none."""
    _, _, version = model.rpartition("@")
    if not version.isdecimal():
        raise ServerFailed("a server", f"its answer names {model!r} as model, which is no version of the policy")
    return int(version)


def _chat(model: str, problem: Problem, *, temperature: float, n: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": _messages(problem),
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": temperature,
        "n": n,
        "logprobs": True,
        "return_token_ids": True,
        **_EXACT,
    }


def _messages(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]
