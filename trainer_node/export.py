"""From a live PEFT model to what travels: the layout, and the tensors in its order.

Names are those that PEFT saves; `lora_config.py` says what becomes of the config. Nothing is copied: packing does
that, and casts on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from bus.base_model import base_config, base_directory, base_model_at, fingerprint
from bus.errors import InvalidInput, InvalidLayout
from bus.manifest import AdapterLayout, BaseModel
from trainer_node.lora_config import layout_of, refuse_unservable, without_wrappers

_SOURCE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


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


def arranged(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], base: BaseModel, dtype: torch.dtype
) -> ExportedAdapter:
    """Put tensors into their order on the wire, sorted by name, under a layout.

    Raises `InvalidLayout` for tensors that are empty, of another rank than the config says, not finite in
    `dtype`, or not LoRA pairs.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = layout_of(config, shapes, base, str(dtype).removeprefix("torch."))
    tensors = {spec.name: tensors[spec.name] for spec in layout.tensors}
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
