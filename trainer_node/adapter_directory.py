"""An adapter that `save_pretrained` left in a directory, read as if its model were still in memory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from bus.base_model import base_config, base_model_at
from bus.errors import InvalidInput
from bus.manifest import ITEM_BYTES, AdapterLayout
from trainer_node.lora_config import layout_of, refuse_unservable, without_wrappers

if TYPE_CHECKING:
    from trainer_node.exported import ExportedAdapter

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_ADAPTER_NAME: Final = re.compile(r"(\.lora_[AB])\.[^.]+(\.weight)$|(\.lora_embedding_[AB])\.[^.]+$")
"""An adapter's name inside a tensor's name: there if a state dict was saved by hand, not if PEFT saved it."""


@dataclass(frozen=True)
class AdapterDirectory:
    """A saved adapter as its files' headers tell of it; no weight has been read, and torch is not needed yet."""

    weights: Path
    layout: AdapterLayout
    config: dict[str, Any]
    dtype: str

    def load(self) -> ExportedAdapter:
        """Read the weights; raises `InvalidInput` for a damaged file, `InvalidLayout` for values not finite."""
        import torch  # a second and a half that a refused push does without
        from safetensors.torch import load_file

        from trainer_node.exported import arranged

        try:
            tensors = {_plain_name(name): tensor for name, tensor in load_file(self.weights).items()}
        except (OSError, SafetensorError) as error:
            raise _incomplete(self.weights, error) from error
        return arranged(self.config, tensors, self.layout.base_model, getattr(torch, self.dtype))


def read_adapter_directory(path: Path, *, base_model: str | None = None) -> AdapterDirectory:
    """Look at a saved LoRA adapter; once loaded, it equals the live export of the model that saved it.

    `base_model` replaces the path or hub id that the adapter names, for when that is elsewhere on this machine.
    It is served in the base model's dtype. Raises `InvalidInput` for anything that is not an adapter directory
    or whose base model is not here, `InvalidLayout` for an adapter no server could serve.
    """
    config = _config(path)
    weights = _weights(path)
    shapes = _shapes(weights)
    refuse_unservable(config, tuple(shapes))
    base = base_model or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InvalidInput(f"{path / _CONFIG} does not say which base model the adapter is for; name it")
    try:
        identity, served = base_model_at(base), base_config(base)
    except InvalidInput as error:
        raise InvalidInput(f"adapter {path}: {error}") from None
    dtype = _dtype(served)
    return AdapterDirectory(weights, layout_of(config, shapes, identity, dtype), config, dtype)


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


def _weights(path: Path) -> Path:
    file = path / _WEIGHTS
    if (path / "adapter_model.bin").is_file() and not file.is_file():
        raise InvalidInput(
            f"{path} holds pickled weights, which are not safe to open; save the adapter again with "
            f"safe_serialization=True"
        )
    if not file.is_file():
        raise InvalidInput(f"{path} holds no {_WEIGHTS}; save the adapter again with save_pretrained")
    return file


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(weights, framework="numpy") as file:
            return {_plain_name(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _incomplete(weights, error) from error


def _plain_name(name: str) -> str:
    return _ADAPTER_NAME.sub(r"\1\2\3", without_wrappers(name))


def _incomplete(file: Path, error: Exception) -> InvalidInput:
    return InvalidInput(f"{file} is not a complete safetensors file ({error}); save the adapter again")


def _dtype(config: dict[str, Any]) -> str:
    """The dtype that the base model's config asks for; bfloat16, in which servers run, if it asks for none."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        dtype = str(source.get("dtype") or source.get("torch_dtype")).removeprefix("torch.")
        if dtype in ITEM_BYTES:
            return dtype
    return "bfloat16"
