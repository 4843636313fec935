"""The whole thing as a user runs it: a PEFT model, the publisher, two stock vLLM servers, HTTP, the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from bus.events import Outcome
from tools.demo.fleet import Server, running_servers
from tools.model import demo_model
from trainer_node import AdapterPublisher

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(600)]

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Fleet:
    publisher: AdapterPublisher
    servers: list[Server]
    model: Path

    async def served_by(self, server: Server, model: str = "policy") -> str:
        """The `model` that a response names; an HTTP error fails the test with the server's words."""
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            request = {"model": model, "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
            response = await client.post(f"{server.url}/v1/completions", json=request)
            assert response.status_code == 200, response.text
            return str(response.json()["model"])

    async def models(self, server: Server) -> set[str]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            listed = (await client.get(f"{server.url}/v1/models")).json()["data"]
            names = [entry["id"] for entry in listed]
            assert len(names) == len(set(names))
            return set(names)


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    logs = tmp_path_factory.mktemp("servers")
    model = demo_model()
    async with (
        AdapterPublisher("policy", bind="tcp://127.0.0.1:0") as publisher,
        running_servers(str(model), publisher.address, 2, logs, lambda node, doing: None) as servers,
    ):
        await publisher.wait_for_nodes(2, timeout=60)
        yield Fleet(publisher, servers, model)


def lora(model: Path, seed: int, rank: int = 16) -> peft.PeftModel:
    """A PEFT model whose adapter does something: B is not zero."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=MODULES, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted


async def run_adapterbus(*arguments: str) -> tuple[int, str, float]:
    """The command's exit code, what it printed, and how many seconds it took."""
    started = time.monotonic()
    done = await anyio.run_process(
        [sys.executable, "-m", "tools", *arguments], check=False, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout.decode(), time.monotonic() - started


async def test_publish_to_the_responses_model_field(fleet: Fleet) -> None:
    model = lora(fleet.model, seed=1)
    for version in (1, 2):
        update = await fleet.publisher.publish(model, step=version)
        assert update.version == version
        assert [node.outcome for node in update.nodes] == [Outcome.ACTIVATED] * 2
        for server in fleet.servers:
            assert await fleet.served_by(server) == f"policy@{version}"
    for server in fleet.servers:
        assert await fleet.served_by(server, "policy@1") == "policy@1"
        assert {"policy", "policy@1", "policy@2"} <= await fleet.models(server)


async def test_push_brings_a_saved_adapter_to_both_servers(fleet: Fleet, tmp_path: Path) -> None:
    lora(fleet.model, seed=2).save_pretrained(tmp_path / "pushed")
    code, printed, _ = await run_adapterbus(
        "push", str(tmp_path / "pushed"), "--bus", fleet.publisher.address, "--json"
    )
    assert code == 0, printed
    told = json.loads(printed)
    assert (told["adapter"], told["version"], told["tensors"]) == ("pushed", 1, 420)
    assert told["nodes"] == {"node-0": "activated", "node-1": "activated"}
    assert set(told["phases_ms"]) == {"ready", "transfer", "load", "commit", "total"}
    for server in fleet.servers:
        assert await fleet.served_by(server, "pushed") == "pushed@1"
        assert await fleet.served_by(server) == "policy@2"


async def test_a_rank_above_the_servers_maximum_is_refused_at_once(fleet: Fleet, tmp_path: Path) -> None:
    """B002."""
    lora(fleet.model, seed=3, rank=64).save_pretrained(tmp_path / "large")
    code, printed, seconds = await run_adapterbus("push", str(tmp_path / "large"), "--bus", fleet.publisher.address)
    assert code == 1, printed
    assert "node-0" in printed
    assert "rank 64" in printed
    assert "at most 16" in printed
    assert "Traceback" not in printed
    assert seconds < 2
    for server in fleet.servers:
        assert await fleet.served_by(server) == "policy@2"


async def test_status_names_every_node_with_what_it_serves(fleet: Fleet) -> None:
    code, printed, _ = await run_adapterbus("status", "--bus", fleet.publisher.address, "--json")
    assert code == 0, printed
    nodes = {node["node"]: node for node in json.loads(printed)["nodes"] if node["role"] == "rollout"}
    assert {node: nodes[node]["serves"]["policy"] for node in nodes} == {"node-0": 2, "node-1": 2}
    assert {node: nodes[node]["lag"]["policy"] for node in nodes} == {"node-0": 0, "node-1": 0}


async def test_a_killed_server_is_named_and_a_new_one_gets_the_head(fleet: Fleet, tmp_path: Path) -> None:
    """B017: the run goes on with the other, and nothing is restarted by hand."""
    model = lora(fleet.model, seed=4)
    doomed, survivor = fleet.servers
    os.killpg(doomed.process.pid, signal.SIGKILL)
    update = await fleet.publisher.publish(model)
    assert update.seconds < fleet.publisher.settings.timeouts.lease + 5
    outcomes = {node.node: node for node in update.nodes}
    assert (outcomes["node-0"].outcome, outcomes["node-1"].outcome) == (Outcome.LOST, Outcome.ACTIVATED)
    assert outcomes["node-0"].phase
    assert await fleet.served_by(survivor) == f"policy@{update.version}"
    async with running_servers(str(fleet.model), fleet.publisher.address, 1, tmp_path, lambda node, doing: None) as new:
        await fleet.publisher.wait_for_nodes(2, timeout=60)
        with anyio.fail_after(20):
            while f"policy@{update.version}" not in await fleet.models(new[0]):  # noqa: ASYNC110 - a server tells when asked
                await anyio.sleep(0.2)
        assert await fleet.served_by(new[0]) == f"policy@{update.version}"
        final = await fleet.publisher.publish(model)
        assert [node.outcome for node in final.nodes] == [Outcome.ACTIVATED] * 2
