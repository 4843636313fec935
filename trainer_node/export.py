"""From a live PEFT model to what travels: the layout, and the tensors in its order.

Names are those that PEFT saves. The config on the wire is reduced to what a LoRA server needs, so that it does
not change with dropout, paths or releases of PEFT. What no server could serve faithfully is refused here, at the
trainer, by name. Nothing is copied: packing does that, and casts on the way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn

from bus.base_model import base_config, base_directory, base_model_at, fingerprint
from bus.errors import InvalidInput, InvalidLayout
from bus.manifest import AdapterLayout, BaseModel, TensorSpec

_WRAPPERS: Final = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing insert into names; PEFT saves without them."""

_SOURCE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_LORA_ENDINGS: Final = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")

_HARMLESS_STARTS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""The named initialisations that leave the base weights alone."""

_UNSERVABLE: Final = {
    "use_dora": "Train without DoRA, or serve a merged model",
    "modules_to_save": "Train LoRA on these modules instead, or serve a merged model",
    "trainable_token_indices": "Train the embedding with LoRA instead, or serve a merged model",
    "lora_bias": "Train with lora_bias=False",
    "target_parameters": "Target modules instead of parameters",
    "layer_replication": "Serve a merged model",
    "alora_invocation_tokens": "Train an ordinary LoRA",
    "use_qalora": "Train an ordinary LoRA",
    "use_bdlora": "Train an ordinary LoRA",
    "arrow_config": "Train an ordinary LoRA",
    "kasa_config": "Train an ordinary LoRA",
    "monteclora_config": "Train an ordinary LoRA",
}
"""Fields of a LoRA config that change what the adapter computes, beyond B·A·scale, with the way out."""


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter ready to be packed: `tensors` are the live ones, detached, by the layout's names in its order.

    The layout states the dtype on the wire; the tensors still have the trainer's.
    """

    layout: AdapterLayout
    tensors: dict[str, torch.Tensor]


def export_adapter(
    model: nn.Module, adapter: str | None = None, *, dtype: torch.dtype | None = None
) -> ExportedAdapter:
    """Look at one LoRA adapter of a PEFT model, wrapped by torch.compile, DDP or FSDP or not.

    `adapter` is PEFT's name for it and may be left out where there is only one; `dtype` is the one to serve in,
    by default the base model's. The layout is the same object for as long as names, shapes, config and dtype
    are. Raises `InvalidInput` for a model without such an adapter and `InvalidLayout`, which names the tensors,
    for an adapter that a LoRA server cannot serve.
    """
    peft_model = _unwrapped(model)
    name = _chosen(peft_model, adapter)
    config = vars(peft_model.peft_config[name])
    base = peft_model.get_base_model()
    tensors, beside = _saved(peft_model, name)
    refuse_unservable(config, (*tensors, *beside))
    return arranged(config, tensors, _base_model(config, base), dtype or _base_dtype(base))


def refuse_unservable(config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise `InvalidLayout` if the PEFT config asks for more than plain LoRA; `names` are the tensors it saves."""
    if str(getattr(config.get("peft_type"), "value", config.get("peft_type"))) != "LORA":
        raise InvalidInput(f"the adapter's type is {config.get('peft_type')}; only LORA can be served")
    extra = tuple(name for name in names if not name.endswith(_LORA_ENDINGS))
    for field, remedy in _UNSERVABLE.items():
        if config.get(field):
            raise InvalidLayout(f"a LoRA server cannot serve {field}={config[field]!r}", extra, f"{remedy}.")
    if config.get("bias", "none") != "none":
        raise InvalidLayout(f"a LoRA server cannot serve bias={config['bias']!r}", extra, "Train with bias='none'.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _HARMLESS_STARTS:
        raise InvalidLayout(
            f"init_lora_weights={start!r} changes the base weights, so the adapter is wrong on a server's own copy",
            remedy="Convert it with save_pretrained(path_initial_model_for_weight_conversion=...) and push the result, "
            "or train with another initialisation.",
        )


def without_wrappers(name: str) -> str:
    """A name as it is without torch.compile, FSDP or activation checkpointing."""
    return _WRAPPERS.sub("", name)


def arranged(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], base: BaseModel, dtype: torch.dtype
) -> ExportedAdapter:
    """Put tensors into their order on the wire, sorted by name, under a layout.

    Raises `InvalidLayout` for tensors that are empty, of another rank than the config says, not finite in
    `dtype`, or not LoRA pairs.
    """
    tensors = {name: tensors[name] for name in sorted(tensors)}
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
    layout = _layout(base, _facts(config), shapes, str(dtype).removeprefix("torch."))
    _check_values(tensors, dtype)
    return ExportedAdapter(layout, tensors)


def _unwrapped(model: nn.Module) -> Any:
    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PeftModel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if inner is None or not isinstance(inner, PeftModel):
        raise InvalidInput(f"{type(model).__name__} is not a PEFT model; wrap it with peft.get_peft_model first")
    return inner


def _chosen(model: Any, adapter: str | None) -> str:
    known = tuple(model.peft_config)
    if adapter is None and len(known) == 1:
        return str(known[0])
    if adapter is None:
        raise InvalidInput(f"the model has several adapters ({', '.join(known)}); say which one to publish")
    if adapter not in known:
        raise InvalidInput(f"the model has no adapter {adapter!r}; it has {', '.join(known)}")
    return adapter


def _saved(model: nn.Module, adapter: str) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """What PEFT would save, by its names: the tensors in LoRA layers, and the names of whole modules beside them.

    The layers are asked, not the names of the state dict: there, an adapter called `weight` or `lora_A` cannot
    be told from the parts of a name.
    """
    tensors: dict[str, torch.Tensor] = {}
    beside: list[str] = []
    for module_name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            prefix = without_wrappers(module_name)
            for kind, by_adapter in module.named_children():
                if not isinstance(by_adapter, nn.ModuleDict | nn.ParameterDict) or adapter not in by_adapter:
                    continue
                part = by_adapter[adapter]
                if isinstance(part, nn.Parameter):
                    tensors[f"{prefix}.{kind}"] = part.detach()
                else:
                    for name, parameter in part.named_parameters():
                        tensors[f"{prefix}.{kind}.{name}"] = parameter.detach()
        elif isinstance(module, AuxiliaryTrainingWrapper):
            beside += (without_wrappers(f"{module_name}.{n}") for n in module.adapter_state_dict_load_map(adapter))
    return tensors, tuple(beside)


def _base_dtype(base: nn.Module) -> torch.dtype:
    """The dtype the base computes in: that of its first weight that is not quantised."""
    for name, parameter in base.named_parameters():
        if parameter.dtype in _SOURCE_DTYPES and ".lora_" not in name:
            return parameter.dtype
    return torch.bfloat16


def _base_model(config: Mapping[str, Any], base: Any) -> BaseModel:
    """Identify the base by the directory it was loaded from, or by its config alone where that is unknown."""
    live = base.config.to_dict() if hasattr(getattr(base, "config", None), "to_dict") else {}
    name = str(config.get("base_model_name_or_path") or getattr(base, "name_or_path", ""))
    if base_directory(name) is None:
        return BaseModel(name or type(base).__name__, fingerprint(live, None))
    found, saved = _base_on_disk(name)
    vocabulary = live.get("vocab_size")
    if vocabulary is not None and vocabulary != saved.get("vocab_size", vocabulary):
        raise InvalidLayout(
            f"the model's vocabulary was resized to {vocabulary} from the {saved['vocab_size']} of {name}",
            remedy="Save the resized base model, train on that, and serve it.",
        )
    return found


@lru_cache(maxsize=8)
def _base_on_disk(name: str) -> tuple[BaseModel, dict[str, Any]]:
    """Kept, since what counts is what the model was loaded from, and a publish must not read files."""
    return base_model_at(name), base_config(name)


def _facts(config: Mapping[str, Any]) -> str:
    """The part of a PEFT config that a server needs, as JSON that is the same on every run.

    The patterns keep their order: PEFT takes the first that matches.
    """
    task = config.get("task_type")
    return json.dumps(
        {
            "alpha_pattern": _pattern(config, "alpha_pattern"),
            "bias": "none",
            "lora_alpha": _number("lora_alpha", config.get("lora_alpha")),
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": _number("r", config.get("r")),
            "rank_pattern": _pattern(config, "rank_pattern"),
            "task_type": None if task is None else str(getattr(task, "value", task)),
            "use_dora": False,
            "use_rslora": bool(config.get("use_rslora")),
        }
    )


def _pattern(config: Mapping[str, Any], field: str) -> dict[str, int | float]:
    pattern = config.get(field) or {}
    try:
        return {re.compile(key).pattern: _number(f"{field}[{key!r}]", value) for key, value in pattern.items()}
    except (AttributeError, TypeError, re.error) as error:
        raise InvalidInput(f"the PEFT config's {field} is not a mapping from module patterns ({error})") from None


def _number(field: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidInput(f"the PEFT config's {field} is {value!r}; it must be a number")
    exact = float(value)
    return int(exact) if exact.is_integer() else exact


@lru_cache(maxsize=8)
def _layout(base: BaseModel, facts: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: str) -> AdapterLayout:
    """Build a layout, or find the one built before: for 18,040 tensors that saves most of a publish's own time."""
    config = json.loads(facts)
    _check_ranks(config, shapes)
    tensors = tuple(TensorSpec(name, dtype, shape) for name, shape in shapes)
    # What PEFT was told to target may be a regex or "all-linear"; what it did target is in the names.
    config["target_modules"] = sorted({tensor.module.rpartition(".")[2] for tensor in tensors})
    return AdapterLayout(base, json.dumps(config, separators=(",", ":")), tensors)


def _check_ranks(config: Mapping[str, Any], shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    """Shapes must have the rank that the config states: a shard, or another adapter's config, would not."""
    wrong = []
    for name, shape in shapes:
        module, ending, _ = name.removeprefix("base_model.model.").partition(".lora_")
        if not ending or not name.endswith(_LORA_ENDINGS):
            continue
        ranks: dict[str, int] = config["rank_pattern"]
        rank = ranks.get(get_pattern_key(tuple(ranks), module), config["r"]) if ranks else config["r"]
        down = name.endswith((".lora_A.weight", ".lora_embedding_A"))
        if len(shape) < 2 or 0 in shape or shape[0 if down else 1] != rank:
            expected = f"({rank}, in)" if down else f"(out, {rank})"
            wrong.append(f"{name} {shape}, expected {expected}")
    if wrong:
        raise InvalidLayout(
            "tensors do not have the rank that the PEFT config states",
            tuple(wrong),
            "If the trainer shards its parameters (ZeRO-3, FSDP), gather them before export.",
        )


def _check_values(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse what is not a finite number on the wire. One pass, one wait per device."""
    foreign = tuple(name for name, tensor in tensors.items() if tensor.dtype not in _SOURCE_DTYPES)
    if foreign:
        kinds = ", ".join(sorted({str(tensors[name].dtype) for name in foreign}))
        raise InvalidLayout(
            f"LoRA weights of {kinds}", foreign, "Keep the adapter in float32, bfloat16 or float16; only casts follow."
        )
    largest = torch.finfo(dtype).max
    extremes: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        extremes.setdefault(tensor.device, []).extend(tensor.aminmax())  # a tenth of a norm's time, and NaN stays NaN
    if not all(bool((torch.stack(found).double().abs() <= largest).all()) for found in extremes.values()):
        raise InvalidLayout(
            f"weights that are NaN, infinite, or beyond {dtype}",
            tuple(name for name, tensor in tensors.items() if not bool(tensor.double().abs().max() <= largest)),
            "Training has diverged: go back to an earlier checkpoint, and lower the learning rate.",
        )
