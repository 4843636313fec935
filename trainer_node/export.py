"""From a live PEFT model to what travels: the layout, and the tensors in its order.

Names are those that PEFT saves; `lora_config.py` says what becomes of the config. Nothing is copied: packing does
that, and casts on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from bus.base_model import base_config, base_directory, base_model_at, fingerprint
from bus.errors import InvalidInput, InvalidLayout
from bus.manifest import BaseModel
from trainer_node.exported import SOURCE_DTYPES, ExportedAdapter, arranged
from trainer_node.lora_config import refuse_unservable, without_wrappers


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
        if parameter.dtype in SOURCE_DTYPES and ".lora_" not in name:
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
