"""What an export gives, whatever it was made from: a layout, and tensors that are fit to be sent under it.

Knows torch but not PEFT, whose import takes seconds that `adapterbus push` does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from bus.errors import InvalidLayout
from bus.manifest import AdapterLayout, BaseModel
from trainer_node.lora_config import layout_of

SOURCE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that LoRA weights may have at the trainer."""


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter ready to be packed: `tensors` are the live ones, detached, by the layout's names in its order.

    The layout states the dtype on the wire; the tensors still have the trainer's.
    """

    layout: AdapterLayout
    tensors: dict[str, torch.Tensor]


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


def _check_values(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse what is not a finite number on the wire. One pass, one wait per device."""
    foreign = tuple(name for name, tensor in tensors.items() if tensor.dtype not in SOURCE_DTYPES)
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
