"""An adapter that `save_pretrained` left in a directory, read as if its model were still in memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bus.base_model import base_config, base_model_at
from bus.errors import InvalidInput
from trainer_node.export import ExportedAdapter, arranged, refuse_unservable, without_wrappers

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_ADAPTER_NAME: Final = re.compile(r"(\.lora_[AB])\.[^.]+(\.weight)$|(\.lora_embedding_[AB])\.[^.]+$")
"""An adapter's name inside a tensor's name: there if a state dict was saved by hand, not if PEFT saved it."""


def read_adapter_directory(
    path: Path, *, base_model: str | None = None, dtype: torch.dtype | None = None
) -> ExportedAdapter:
    """Read a saved LoRA adapter; the result equals the live export of the model that saved it.

    `base_model` replaces the path or hub id that the adapter names, for when that is elsewhere on this machine.
    `dtype` is the one to serve in, by default the base model's. Raises `InvalidInput` for anything that is not
    an adapter directory or whose base model is not here, `InvalidLayout` for an adapter no server could serve.
    """
    config = _config(path)
    tensors = {_ADAPTER_NAME.sub(r"\1\2\3", without_wrappers(name)): t for name, t in _weights(path).items()}
    refuse_unservable(config, tuple(tensors))
    base = base_model or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InvalidInput(f"{path / _CONFIG} does not say which base model the adapter is for; name it")
    try:
        identity, served = base_model_at(base), base_config(base)
    except InvalidInput as error:
        raise InvalidInput(f"adapter {path}: {error}") from None
    return arranged(config, tensors, identity, dtype or _dtype(served))


def _config(path: Path) -> dict[str, Any]:
    file = path / _CONFIG
    if not path.is_dir():
        raise InvalidInput(f"there is no adapter directory {path}; give the one that save_pretrained wrote")
    if not file.is_file():
        inside = sorted(child.parent for child in path.glob(f"*/{_CONFIG}"))
        hint = (
            f"did you mean {inside[0]}?" if inside else "give the directory that a PEFT model's save_pretrained wrote"
        )
        raise InvalidInput(f"{path} is no PEFT adapter: it holds no {_CONFIG}; {hint}")
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} cannot be read ({error}); save the adapter again") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{file} holds no JSON object; save the adapter again")
    return config


def _weights(path: Path) -> dict[str, torch.Tensor]:
    file = path / _WEIGHTS
    if (path / "adapter_model.bin").is_file() and not file.is_file():
        raise InvalidInput(
            f"{path} holds pickled weights, which are not safe to open; save the adapter again with "
            f"safe_serialization=True"
        )
    if not file.is_file():
        raise InvalidInput(f"{path} holds no {_WEIGHTS}; save the adapter again with save_pretrained")
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{file} is not a complete safetensors file ({error}); save the adapter again") from error


def _dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that the base model's config asks for; bfloat16, in which servers run, if it asks for none."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        dtype = getattr(torch, str(source.get("dtype") or source.get("torch_dtype")), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.bfloat16
