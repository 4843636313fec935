"""A real vLLM server takes adapters from memory: proven against PEFT, under load, refusals and aborts included."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bus.codec import EVENT_CODEC
from bus.collective import AdapterBuffer, Collective, RendezvousStore
from bus.errors import EngineUnsupported, LoadFailed
from bus.events import (
    AdapterReceived,
    Attempt,
    Envelope,
    Event,
    LayoutDeclared,
    Member,
    Peer,
    Phase,
    Reason,
    StatusRequested,
    TransferStarted,
    UpdateAborted,
    UpdateAnnounced,
    VersionCommitted,
    ViewProposed,
)
from bus.manifest import AdapterLayout, AdapterManifest, BaseModel, TensorSpec
from rollout_node.serve import server_command
from rollout_node.vllm_seam import AdapterSlots
from tools.model import demo_model
from trainer_node.export import export_adapter
from trainer_node.exported import ExportedAdapter

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(600)]

NODE = "server"
TESTS = Path(__file__).parent
PROBE = "The quick brown fox jumps over the lazy dog, and then it sleeps."


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model_path() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one vLLM server, started as `adapterbus serve` starts it, driven by our test plugin."""
    plugins = tmp_path_factory.mktemp("plugins")
    metadata = plugins / "adapterbus_driver-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: adapterbus-driver\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.endpoint_plugins]\nadapterbus-driver = engine_driver:EngineDriver\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, environment = server_command(
        str(model_path),
        vllm_args=[
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--enforce-eager"),
            *("--max-num-seqs", "16", "--max-loras", "4", "--max-lora-rank", "16"),
        ],
        environment=os.environ
        | {
            "VLLM_PLUGINS": "adapterbus-driver",
            "PYTHONPATH": f"{plugins}:{TESTS}",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
    )
    log = plugins / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        sys.stdout.write(log.read_text()[-6000:])


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Source:
    """What a trainer and a controller do for one server, step by step."""

    http: httpx.AsyncClient
    collective: Collective
    view: int
    numbers: Iterator[int]
    layouts: set[str] = field(default_factory=set)
    undecided: set[Attempt] = field(default_factory=set)

    async def drive(self, event: Event) -> dict[str, Any]:
        answer = await self.http.post("/drive", content=EVENT_CODEC.encode(Envelope("", 0, event)))
        answer.raise_for_status()
        return dict(answer.json())

    async def announce(
        self, attempt: Attempt, layout: AdapterLayout, digest: str, timeout: float = 10.0
    ) -> dict[str, Any]:
        if layout.digest not in self.layouts:
            self.layouts.add(layout.digest)
            await self.drive(LayoutDeclared(layout.digest, layout.body))
        manifest = AdapterManifest.of(layout, digest)
        self.undecided.add(attempt)
        return await self.drive(UpdateAnnounced(attempt, "r", "trainer", (NODE,), manifest, timeout))

    async def transfer(self, attempt: Attempt, buffer: AdapterBuffer, manifest: AdapterManifest) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []

        async def receive() -> None:
            answers.append(await self.drive(TransferStarted(attempt, (NODE,), 20.0)))

        async with anyio.create_task_group() as both:
            both.start_soon(receive)
            await self.collective.transfer(self.view, buffer, manifest, audience=(1,), timeout=20.0)
        return answers[0]

    async def publish(self, model: Any, adapter: str = "policy") -> tuple[Attempt, dict[str, Any]]:
        """One version all the way to active; returns what the load proved."""
        exported = export_adapter(model, dtype=torch.bfloat16)
        buffer = AdapterBuffer(exported.layout.nbytes)
        buffer.pack(exported.layout, exported.tensors)
        digest = buffer.digest(exported.layout.nbytes)
        attempt = Attempt(adapter, next(self.numbers), 1, self.view)
        assert await self.announce(attempt, exported.layout, digest) == {"result": None}
        received = await self.transfer(attempt, buffer, AdapterManifest.of(exported.layout, digest))
        assert received["result"]["digest"] == digest
        loaded = (await self.drive(AdapterReceived(attempt, Peer(NODE, ""), digest, 0.0)))["result"]
        assert loaded["digest"] == digest
        assert await self.drive(VersionCommitted(attempt, digest)) == {"result": None}
        self.undecided.remove(attempt)
        return attempt, loaded

    async def abort(self, attempt: Attempt) -> None:
        aborted = UpdateAborted(attempt, Phase.LOAD, NODE, Reason.NODE_LOST, "", True, 0.0)
        assert await self.drive(aborted) == {"result": None}

    async def answer(self, model: str, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": model, "prompt": PROBE, "max_tokens": 1} | fields)

    async def logprobs(self, model: str, ids: list[int]) -> torch.Tensor:
        answer = await self.answer(model, prompt=ids, prompt_logprobs=0, temperature=0)
        steps = answer.json()["choices"][0]["prompt_logprobs"][1:]
        return torch.tensor([step[str(token)]["logprob"] for step, token in zip(steps, ids[1:], strict=True)])

    async def models(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]


VIEWS = iter(range(1, 1000))
VERSIONS = iter(range(1, 1000))


@pytest.fixture
async def source(server: str) -> AsyncIterator[Source]:
    async with opened_source(server) as source:
        yield source


@asynccontextmanager
async def opened_source(server: str) -> AsyncIterator[Source]:
    """A source that stands in a group with the server's worker."""
    view, store, collective = next(VIEWS), RendezvousStore("127.0.0.1"), Collective()
    async with httpx.AsyncClient(base_url=server, timeout=60) as http:
        source = Source(http, collective, view, VERSIONS)
        proposal = ViewProposed(view, "trainer", (Member("trainer", 0), Member(NODE, 0)), store.address, 20.0)
        joined: list[dict[str, Any]] = []

        async def join() -> None:
            joined.append(await source.drive(proposal))

        async with anyio.create_task_group() as both:
            both.start_soon(join)
            await collective.join(view, rank=0, size=2, store=store.address, timeout=20.0)
        assert joined == [{"result": None}]
        yield source
        for attempt in source.undecided:
            await source.abort(attempt)
        await collective.aclose()
        store.close()


def policy(model_path: Path, seed: int, rank: int = 16, scale: float = 0.06, targets: Any = "all-linear") -> Any:
    """The base model with a LoRA adapter that changes what it says, without training it; exact where servers round."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=targets))
    reseed(model, seed, scale)
    return model


def exported_policy(*arguments: Any, **options: Any) -> ExportedAdapter:
    return export_adapter(policy(*arguments, **options), dtype=torch.bfloat16)


def reseed(model: Any, seed: int, scale: float = 0.06) -> None:
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, scale)


def expected_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    spoken: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return spoken


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().mean().item()


async def test_a_version_computes_what_peft_computes_and_old_versions_stay(source: Source, model_path: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model_path)(PROBE)["input_ids"]
    model = policy(model_path, seed=1)
    first, loaded = await source.publish(model)
    assert loaded["matched"] == loaded["total"] == 420
    expected_first = expected_logprobs(model, ids)
    reseed(model, seed=2)
    second, _ = await source.publish(model)
    expected_second = expected_logprobs(model, ids)
    with model.disable_adapter():
        expected_base = expected_logprobs(model, ids)

    served_first = await source.logprobs(str(first), ids)
    served_second = await source.logprobs("policy", ids)
    served_base = await source.logprobs(str(model_path), ids)
    noise = distance(served_base, expected_base)
    for served, expected, other in (
        (served_first, expected_first, expected_second),
        (served_second, expected_second, expected_first),
    ):
        assert distance(served, expected) < 3 * noise
        assert distance(served, expected_base) > 5 * distance(served, expected)
        assert distance(served, other) > 5 * distance(served, expected)

    assert (await source.answer("policy")).json()["model"] == str(second)
    assert (await source.answer(str(first))).json()["model"] == str(first)
    assert (await source.answer("policy@999")).status_code == 404
    listed = await source.models()
    assert listed.count("policy") == 1
    assert {str(first), str(second), "policy"} < set(listed)
    assert len(set(listed)) == len(listed)


async def test_an_adapter_on_part_of_a_packed_module_is_served(source: Source, model_path: Path) -> None:
    """B053: q_proj without k and v, gate_proj without up."""
    ids = AutoTokenizer.from_pretrained(model_path)(PROBE)["input_ids"]
    model = policy(model_path, seed=3, rank=8, scale=0.05, targets=["q_proj", "gate_proj"])
    attempt, loaded = await source.publish(model)
    assert loaded["matched"] == loaded["total"] == 120
    served = await source.logprobs(str(attempt), ids)
    with model.disable_adapter():
        base = expected_logprobs(model, ids)
    assert distance(served, base) > 5 * distance(served, expected_logprobs(model, ids))


async def test_what_cannot_be_served_is_refused_before_anything_moves(source: Source, model_path: Path) -> None:
    before = await source.models()
    layout = exported_policy(model_path, seed=1, rank=64).layout
    started = time.monotonic()
    refused = await source.announce(Attempt("policy", 500, 1, source.view), layout, "blake3:none")
    assert refused["error"] == "Refused"
    assert refused["reason"] == "rank_too_high"
    assert "64" in refused["text"]
    assert "16" in refused["text"]
    assert time.monotonic() - started < 2

    small = exported_policy(model_path, seed=1, rank=4, targets=["q_proj"]).layout
    tensors = tuple(replace(t, name=t.name.replace("layers.0.", "layers.77.")) for t in small.tensors)
    strange = AdapterLayout(small.base_model, small.peft_config, tensors)
    refused = await source.announce(Attempt("policy", 501, 1, source.view), strange, "blake3:none")
    assert refused["reason"] == "unknown_modules"
    assert "model.layers.77.self_attn.q_proj" in refused["text"]

    refused = await source.announce(Attempt(str(model_path), 1, 1, source.view), small, "blake3:none")
    assert refused["reason"] == "name_taken"
    assert await source.models() == before


async def test_bytes_other_than_the_manifest_says_are_never_loaded(source: Source, model_path: Path) -> None:
    """B092: the receiver hashes what it holds, and a load without it fails."""
    exported = exported_policy(model_path, seed=1, rank=4, targets=["q_proj"])
    buffer = AdapterBuffer(exported.layout.nbytes)
    buffer.pack(exported.layout, exported.tensors)
    attempt = Attempt("other", next(VERSIONS), 1, source.view)
    assert await source.announce(attempt, exported.layout, "blake3:not-this") == {"result": None}
    received = await source.transfer(attempt, buffer, AdapterManifest.of(exported.layout, "blake3:not-this"))
    assert received["result"]["digest"] == buffer.digest(exported.layout.nbytes)
    failed = await source.drive(AdapterReceived(attempt, Peer(NODE, ""), "", 0.0))
    assert failed["error"] == "LoadFailed"
    assert failed["reason"] == "digest_mismatch"
    await source.abort(attempt)
    assert (await source.answer("other")).status_code == 404


async def test_a_discarded_load_leaves_its_slot_to_the_next(source: Source, model_path: Path) -> None:
    """Ten attempts that are loaded and then aborted would fill four slots, did they leave anything behind."""
    exported = exported_policy(model_path, seed=4, rank=4, targets=["q_proj"])
    buffer = AdapterBuffer(exported.layout.nbytes)
    buffer.pack(exported.layout, exported.tensors)
    digest = buffer.digest(exported.layout.nbytes)
    for _ in range(10):
        attempt = Attempt("policy", next(VERSIONS), 1, source.view)
        assert await source.announce(attempt, exported.layout, digest) == {"result": None}
        await source.transfer(attempt, buffer, AdapterManifest.of(exported.layout, digest))
        loaded = await source.drive(AdapterReceived(attempt, Peer(NODE, ""), digest, 0.0))
        assert loaded["result"]["matched"] == 60
        await source.abort(attempt)
        assert (await source.answer(str(attempt))).status_code == 404


async def test_no_request_fails_while_ten_versions_arrive(source: Source, model_path: Path) -> None:
    """B027, B070: add the new one, switch, and retire the old one only when its last request has ended."""
    model = policy(model_path, seed=5)
    first, _ = await source.publish(model)
    seen: list[tuple[int, str]] = []
    answers: list[httpx.Response] = []
    done = False

    async def ask(tokens: int) -> None:
        while not done:
            answer = await source.answer("policy", max_tokens=tokens, ignore_eos=True)
            answers.append(answer)
            seen.append((tokens, answer.json().get("model", "")))

    async with anyio.create_task_group() as load:
        for tokens in (4, 16, 16, 64):
            load.start_soon(ask, tokens)
        for seed in range(10, 20):
            reseed(model, seed)
            last, loaded = await source.publish(model)
            assert loaded["matched"] == loaded["total"]
        await source.answer("policy")
        done = True
    assert [answer.status_code for answer in answers if answer.status_code != 200] == []
    assert len({name for _, name in seen}) >= 5
    assert (await source.answer(str(first))).status_code == 404
    assert (await source.answer(str(last))).json()["model"] == str(last)


async def test_a_version_is_kept_for_a_request_that_still_streams(source: Source, model_path: Path) -> None:
    """A client that hangs up sets its version free; until then every slot stays accounted for."""
    model = policy(model_path, seed=6, rank=4, targets=["q_proj"])
    held, _ = await source.publish(model)
    request = {"model": str(held), "prompt": PROBE, "max_tokens": 450, "ignore_eos": True, "stream": True}
    async with source.http.stream("POST", "/v1/completions", json=request) as stream:
        lines = stream.aiter_lines()
        assert f'"model":"{held}"' in await anext(lines)
        for _ in range(3):
            reseed(model, seed=next(VERSIONS), scale=0.01)
            await source.publish(model)
        async for line in lines:
            if line.startswith("data: {"):
                assert f'"model":"{held}"' in line
                break
    with anyio.fail_after(20):
        while (await source.http.get("/retired")).json() != {"adapter": "policy", "version": held.version}:
            pass


async def test_the_engine_says_what_it_can_serve(source: Source, model_path: Path) -> None:
    capabilities = (await source.drive(StatusRequested(Peer("test", ""))))["result"]
    assert capabilities["max_rank"] == 16
    assert capabilities["slots"] == 4
    assert capabilities["workers"] == 1
    assert capabilities["dtype"] == "bfloat16"
    assert set(capabilities["modules"]) >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "qkv_proj" not in capabilities["modules"]
    assert capabilities["base_model"]["name"] == model_path.name


class PretendManager:
    """vLLM's adapter manager around its real `LoRAModel`, on a model of two modules; `passed_over` loses one."""

    def __init__(self, passed_over: str = "") -> None:
        self.model = object()
        self.modules = {"m.q_proj": object(), "m.o_proj": object()}
        self.packed_modules: dict[str, list[str]] = {}
        self.lora_index_to_id: list[int | None] = [None]
        self.registered: dict[int, Any] = {}
        self._passed_over = passed_over

    def add_adapter(self, model: Any) -> bool:
        model.loras.pop(self._passed_over, None)
        self.registered[model.id] = model
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        self.lora_index_to_id[0] = lora_id
        return True

    def pin_adapter(self, lora_id: int) -> bool:
        return True

    def remove_adapter(self, lora_id: int) -> bool:
        self.lora_index_to_id[0] = None
        return self.registered.pop(lora_id, None) is not None

    def list_adapters(self) -> dict[int, Any]:
        return dict(self.registered)


def slots_of(manager: PretendManager) -> AdapterSlots:
    config = SimpleNamespace(lora_dtype=torch.bfloat16, max_lora_rank=16, max_loras=1)
    lora = SimpleNamespace(_adapter_manager=manager, lora_config=config, vocab_size=100)
    return AdapterSlots(SimpleNamespace(device=torch.device("cpu"), model_runner=SimpleNamespace(lora_manager=lora)))


def two_modules() -> tuple[AdapterLayout, dict[str, torch.Tensor]]:
    names = [f"base_model.model.m.{module}.lora_{part}.weight" for module in ("q_proj", "o_proj") for part in "AB"]
    specs = tuple(TensorSpec(name, "float32", (4, 4)) for name in names)
    config = '{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}'
    return AdapterLayout(BaseModel("tiny", "config:1"), config, specs), {name: torch.ones(4, 4) for name in names}


def test_a_module_that_vllm_passes_over_is_a_load_failure_and_nothing_remains() -> None:
    """B101: loading an adapter and using a part of it looks like success from outside."""
    layout, tensors = two_modules()
    whole = slots_of(PretendManager())
    assert whole.fill(whole.build(layout, tensors, 1), layout) == 4

    manager = PretendManager(passed_over="m.o_proj")
    slots = slots_of(manager)
    with pytest.raises(LoadFailed, match="2 of 4 tensors found their module"):
        slots.fill(slots.build(layout, tensors, 1), layout)
    assert manager.registered == {}
    assert manager.lora_index_to_id == [None]


def test_the_built_adapter_shares_no_memory_with_the_staging_buffer() -> None:
    """B099: vLLM scales lora_B in place, and the buffer takes the next version."""
    layout, tensors = two_modules()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    model = slots_of(PretendManager()).build(layout, tensors, 1)
    assert (model.loras["m.q_proj"].lora_b == 2).all()
    assert all((tensor == 1).all() for tensor in tensors.values())


def test_a_vllm_of_another_shape_is_refused_by_name() -> None:
    """A private name that moved is found when the node starts, not in the middle of an update."""
    manager = PretendManager()
    del manager.packed_modules
    with pytest.raises(EngineUnsupported, match="PretendManager has no packed_modules"):
        slots_of(manager)
    bare = SimpleNamespace(model_runner=SimpleNamespace())
    with pytest.raises(EngineUnsupported, match="start it with --enable-lora"):
        AdapterSlots(bare)
