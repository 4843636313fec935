"""What a PEFT config and tensor shapes make of an adapter: the layout, or a refusal. Knows neither torch nor PEFT.

The config on the wire is reduced to what a LoRA server needs, so that it does not change with dropout, paths or
releases of PEFT. What no server could serve faithfully is refused here, at the trainer, by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, Final

from bus.errors import InvalidInput, InvalidLayout
from bus.manifest import AdapterLayout, BaseModel, TensorSpec

_WRAPPERS: Final = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing insert into names; PEFT saves without them."""

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


def layout_of(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], base: BaseModel, dtype: str
) -> AdapterLayout:
    """The layout of an adapter: `shapes` by name as PEFT saves them, all to be served in `dtype` (torch's name).

    Tensors lie in the order of their names. The layout is the same object for as long as its parts are the same.
    Raises `InvalidLayout` for tensors that are empty, of another rank than the config says, or not LoRA pairs.
    """
    return _layout(base, _facts(config), tuple(sorted(shapes.items())), dtype)


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
        rank = next((r for pattern, r in ranks.items() if _matches(pattern, module)), config["r"])
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


def _matches(pattern: str, module: str) -> bool:
    """Whether a key of rank_pattern means a module: PEFT's `get_pattern_key` takes it as the end of the name."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
