"""All contact with vLLM's inside, in one place: written for vLLM 0.32, probed before anything relies on it.

`AdapterSlots` is the worker's side: adapters built in memory, and the slots they are served from.
`ServedModels` is the API server's side: names that requests may ask for, and calls to the workers.
What vLLM does not promise (its private names) is looked up once at the start; a vLLM that has changed shape is
refused with a sentence that names what is missing, not with a crash during an update.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import msgspec
import torch

from bus.errors import EngineUnsupported, LoadFailed, Refused
from bus.events import Reason
from bus.manifest import AdapterLayout
from rollout_node import ENGINE, engine_version


def _look_up(root: object, *paths: str) -> list[Any]:
    """The objects at dotted paths below `root`; raises `EngineUnsupported` for the first that is not there."""
    found = []
    for path in paths:
        here = root
        for name in path.split("."):
            try:
                here = getattr(here, name)
            except AttributeError:
                raise EngineUnsupported(
                    ENGINE, engine_version(), f"{type(root).__name__} has no {path} (at {name})"
                ) from None
        found.append(here)
    return found


def _imported(module: str, *names: str) -> list[Any]:
    """Names out of one of vLLM's modules; raises `EngineUnsupported` if they have moved."""
    try:
        return _look_up(import_module(module), *names)
    except ImportError as error:
        raise EngineUnsupported(ENGINE, engine_version(), f"{module} cannot be imported ({error})") from None


# --------------------------------------------------------------------------------------------- worker


class AdapterSlots:
    """The LoRA slots of one worker process.

    `build` and `differing_modules` may run in any thread beside decoding; `fill` and `remove` change what the
    engine computes with, and belong between two of its steps.
    """

    def __init__(self, worker: Any) -> None:
        """Raises `EngineUnsupported` if this worker is not built as we know it, or serves without LoRA."""
        if getattr(worker.model_runner, "lora_manager", None) is None:
            raise EngineUnsupported(
                ENGINE, engine_version(), "the server runs without LoRA; start it with --enable-lora"
            )
        self._manager, self._config, self._vocabulary = _look_up(
            worker.model_runner.lora_manager, "_adapter_manager", "lora_config", "vocab_size"
        )
        _look_up(self._config, "lora_dtype", "max_lora_rank", "max_loras")
        _look_up(
            self._manager,
            *("add_adapter", "activate_adapter", "pin_adapter", "remove_adapter", "list_adapters"),
            *("lora_index_to_id", "modules", "packed_modules", "model"),
        )
        self._model_of, self._from_tensors = _imported(
            "vllm.lora.lora_model", "LoRAModel", "LoRAModel.from_lora_tensors"
        )
        (self._config_from, _) = _imported("vllm.lora.peft_helper", "PEFTHelper.from_dict", "PEFTHelper.validate_legal")
        (self._parse_name,) = _imported("vllm.lora.utils", "parse_fine_tuned_lora_name")
        (self._linear,) = _imported("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA")
        # Names of packed modules survive only the renaming part of the mapper: the whole one folds q, k, v into qkv.
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if mapper is not None else None
        self.device: str = worker.device.type
        self._homes = {name: name for name in self._manager.modules} | {
            part: whole
            for whole, parts in self._manager.packed_modules.items()
            if whole in self._manager.modules
            for part in parts
        }
        """Each module an adapter may name, in vLLM's spelling, with the module that holds its slot."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """The last parts of the module names that take LoRA, as PEFT calls them (`q_proj`, not `qkv_proj`)."""
        wholes = {whole for whole, parts in self._manager.packed_modules.items() if parts}
        return tuple(sorted({name.rpartition(".")[2] for name in self._homes if name not in wholes}))

    @property
    def dtype(self) -> str:
        """The dtype that adapters are served in, as torch names it."""
        return str(self._config.lora_dtype).removeprefix("torch.")

    def check(self, layout: AdapterLayout) -> None:
        """Raise `Refused` for a config that vLLM cannot honour, or a module that the model does not have."""
        try:
            self._config_from(layout.config).validate_legal(self._config)
        except (ValueError, TypeError) as error:
            raise Refused(Reason.UNSUPPORTED_ADAPTER, str(error)) from None
        strangers = sorted({tensor.module for tensor in layout.tensors if self._home(tensor.name) is None})
        if strangers:
            shown = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
            raise Refused(Reason.UNKNOWN_MODULES, f"the served model has no module that takes LoRA at {shown}")

    def build(self, layout: AdapterLayout, tensors: Mapping[str, torch.Tensor], lora_id: int) -> Any:
        """vLLM's adapter, in host memory and the serving dtype; it shares nothing with the tensors it came from."""
        # The copy is not an economy to save: vLLM scales lora_B in place, and the staging buffer is used again.
        own = {
            name: tensor.to(device="cpu", dtype=self._config.lora_dtype, copy=True) for name, tensor in tensors.items()
        }
        try:
            model = self._from_tensors(
                lora_id,
                own,
                self._config_from(layout.config),
                device="cpu",
                dtype=self._config.lora_dtype,
                model_vocab_size=self._vocabulary,
                weights_mapper=self._mapper,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoadFailed(Reason.ENGINE_FAILED, f"vLLM could not build the adapter: {error}") from None
        for weights in model.loras.values():
            weights.optimize()  # scales lora_B now, beside decoding, instead of while the slot is filled
        return model

    def fill(self, model: Any, layout: AdapterLayout) -> int:
        """Put a built adapter into a slot of its own; returns how many tensors of the layout found their module.

        Raises `LoadFailed`; nothing of the adapter is left in vLLM then. vLLM itself passes over what it cannot
        place (`activate_adapter` resets modules that an adapter does not name), so every tensor is accounted for.
        """
        received = frozenset(model.loras)
        try:
            self._manager.add_adapter(model)
            self._manager.activate_adapter(model.id)
            self._manager.pin_adapter(model.id)  # an evicted adapter would be loaded again from a path it never had
            if self.device != "cpu":
                torch.accelerator.synchronize()
        except (RuntimeError, ValueError, AssertionError, IndexError, KeyError, AttributeError, TypeError) as error:
            self.remove(model.id)
            raise LoadFailed(Reason.ENGINE_FAILED, f"vLLM could not place the adapter: {error!r}") from None
        if model.id not in self._manager.lora_index_to_id or model.id not in self._manager.list_adapters():
            self.remove(model.id)
            raise LoadFailed(Reason.ENGINE_FAILED, f"adapter {model.id} is in none of vLLM's slots after it was placed")
        matched = sum(self._placed(tensor.name, model, received) for tensor in layout.tensors)
        if matched != len(layout.tensors):
            self.remove(model.id)
            raise LoadFailed(Reason.MODULES_UNMATCHED, f"{matched} of {len(layout.tensors)} tensors found their module")
        return matched

    def differing_modules(self, model: Any) -> list[str]:
        """Modules whose slot does not hold, bit for bit and over its whole width, what the adapter says.

        Only linear layers are compared: embeddings and experts lie in their slots in shapes of their own.
        """
        slot = self._manager.lora_index_to_id.index(model.id)
        differing = []
        for name, module in self._manager.modules.items():
            weights = model.get_lora(name)
            if weights is None or not isinstance(module, self._linear):
                continue
            if not all(
                ours.shape == theirs[slot, 0, : ours.shape[0], : ours.shape[1]].shape
                and covers
                and torch.equal(ours.to(theirs.device), theirs[slot, 0, : ours.shape[0], : ours.shape[1]])
                for ours, theirs, covers in _slices(module, weights)
            ):
                differing.append(name)
        return differing

    def remove(self, lora_id: int) -> bool:
        """Empty the slot of an adapter, whatever state it is in; False if there was none."""
        return bool(self._manager.remove_adapter(lora_id))

    def _module(self, tensor: str) -> str:
        name: str = self._parse_name(tensor, self._mapper)[0]
        return name

    def _home(self, tensor: str) -> str | None:
        try:
            return self._homes.get(self._module(tensor))
        except ValueError:
            return None

    def _placed(self, tensor: str, model: Any, received: frozenset[str]) -> bool:
        home = self._home(tensor)
        return self._module(tensor) in received and home is not None and model.get_lora(home) is not None


def _slices(module: Any, weights: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(the adapter's part, the stacked slots, whether the part spans the slot) of a linear layer, on this rank."""
    down, up = weights.lora_a, weights.lora_b
    if isinstance(down, list) and len(down) != module.n_slices:
        down, up = module.expand_packed_lora(down, up)
    if module.tp_size > 1:
        down, up = module.slice_lora_a(down), module.slice_lora_b(up)
    downs, ups = (part if isinstance(part, list | tuple) else [part] for part in (down, up))
    for ours, theirs in zip(downs, module.lora_a_stacked, strict=True):
        if ours is not None:
            yield ours, theirs, ours.shape[1] == theirs.shape[3]
    for ours, theirs in zip(ups, module.lora_b_stacked, strict=True):
        if ours is not None:
            yield ours, theirs, ours.shape[0] == theirs.shape[2]


# ------------------------------------------------------------------------------------------ API server


class ServedModels:
    """What the API server answers for: the names that requests may use, and the workers behind them."""

    def __init__(self, engine_client: Any, state: Any) -> None:
        """Raises `EngineUnsupported` for a server that is not built as we know it, or runs as we cannot follow."""
        self._engine = engine_client
        _look_up(engine_client, "collective_rpc", "vllm_config.parallel_config.world_size")
        config = engine_client.vllm_config
        if config.lora_config is None:
            raise EngineUnsupported(
                ENGINE, engine_version(), "the server runs without LoRA; start it with --enable-lora"
            )
        parallel = config.parallel_config
        for setting in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, setting) > 1:
                flag = setting.replace("_", "-")
                raise EngineUnsupported(
                    ENGINE, engine_version(), f"--{flag} {getattr(parallel, setting)}: only 1 is supported"
                )
        self._names, _, self._numbers = _look_up(
            state, "openai_serving_models.lora_requests", "openai_serving_models.base_model_paths",
            "openai_serving_models.lora_id_counter.inc",
        )  # fmt: skip
        self._taken = frozenset(self._names) | {path.name for path in state.openai_serving_models.base_model_paths}
        self._request = _watched_request()
        self.workers: int = parallel.world_size
        self.max_rank: int = config.lora_config.max_lora_rank
        self.model: str = config.model_config.model
        # A server's own adapters (--lora-modules) are put into slots on demand; pinning all slots would break them.
        self.slots: int = config.lora_config.max_loras - len(self._names)
        if self.slots < 2:
            raise EngineUnsupported(
                ENGINE,
                engine_version(),
                f"{self.slots} LoRA slot for the bus, and a new version needs one beside the old one; "
                f"start the server with a higher --max-loras",
            )

    def is_taken(self, adapter: str) -> bool:
        """Whether the name already belongs to the base model or to an adapter that the server was started with."""
        return adapter in self._taken

    def next_lora_id(self) -> int:
        """A number that no adapter of this server had or will have: vLLM's own counter gives it."""
        return int(self._numbers(1))

    def watched_request(self, name: str, lora_id: int, path: str, on_unused: Callable[[], None]) -> Any:
        """What requests for a version carry; `on_unused` is called, in any thread, when nobody holds it any more.

        An HTTP handler takes this object when it admits a request and holds it until the answer is complete, so
        its life covers what the engine cannot see: the time before a request reaches it, and a search that sends
        one request after another.
        """
        request = self._request(lora_name=name, lora_int_id=lora_id, lora_path=path)
        weakref.finalize(request, on_unused).atexit = False
        return request

    def serve(self, name: str, request: Any) -> None:
        """From now on, requests for `name` get `request`: one store."""
        self._names[name] = request

    def stop_serving(self, name: str) -> None:
        """From now on, requests for `name` are answered with 404."""
        self._names.pop(name, None)

    def release_abandoned(self) -> None:
        """Let go of requests whose clients hung up.

        vLLM leaves these in reference cycles. A collection takes about a millisecond, since vLLM exempts all that
        it built before it began to serve.
        """
        gc.collect()

    async def call_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Run a method of the worker extension on every worker, between two steps of the engine."""
        return list(await self._engine.collective_rpc(method, args=args))


async def list_by_name(serving_models: Any) -> Any:
    """vLLM's answer to /v1/models, each adapter under the name that requests use.

    vLLM lists adapters by their requests' own names, so an alias would show up as a second `policy@8`.
    """
    names = list(serving_models.lora_requests)
    listed = await serving_models.show_available_models()
    for name, card in zip(names, listed.data[len(listed.data) - len(names) :], strict=True):
        card.id = name
    return listed


def _watched_request() -> type[Any]:
    """vLLM's `LoRARequest`, with the one thing it lacks: it can be weakly referenced."""
    (request,) = _imported("vllm.lora.request", "LoRARequest")
    return msgspec.defstruct("WatchedRequest", [], bases=(request,), weakref=True, omit_defaults=True, array_like=True)
