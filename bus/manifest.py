"""What an adapter looks like, and what one version of it holds: known before a byte moves.

An `AdapterLayout` is what does not change from version to version; it may be megabytes and travels once,
named by its digest. An `AdapterManifest` is small, names its layout, and travels with every version.
Offsets are derived from names, dtypes and shapes by one rule, so sender and receiver cannot disagree.

This module knows nothing of torch, sockets or time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from blake3 import blake3

from bus.errors import InvalidLayout

ALIGNMENT: Final = 64
"""Every tensor starts at a multiple of this many bytes in the packed buffer, so any dtype can view it."""

DEFAULT_CHUNK_BYTES: Final = 32 * 1024 * 1024
MAX_TENSORS: Final = 200_000
MAX_DIMENSIONS: Final = 4
MAX_PAYLOAD_BYTES: Final = 64 * 1024**3

ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""The dtypes an adapter may have on the wire, named as torch names them, with bytes per element."""

_DOWN_AND_UP: Final = {
    ".lora_A.weight": ".lora_B.weight",
    ".lora_embedding_A": ".lora_embedding_B",
}
_UP_AND_DOWN: Final = {up: down for down, up in _DOWN_AND_UP.items()}


def digest_of(*parts: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of the concatenated parts as `blake3:<64 hex digits>`."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return f"blake3:{hasher.hexdigest()}"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The frozen model an adapter sits on: its name for people, its fingerprint for machines (`base_model.py`)."""

    name: str
    fingerprint: str

    def matches(self, other: BaseModel) -> bool:
        """Whether two fingerprints name one model: equal configs, and equal weights where both know them."""
        config, _, weights = self.fingerprint.partition("/")
        their_config, _, their_weights = other.fingerprint.partition("/")
        return config == their_config and (weights == their_weights or not weights or not their_weights)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an adapter: the name PEFT saves it under, its dtype on the wire, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidLayout(f"dtype {self.dtype} cannot be sent", (self.name,), f"Cast to {', '.join(ITEM_BYTES)}.")
        if not 1 <= len(self.shape) <= MAX_DIMENSIONS or any(size < 1 for size in self.shape):
            raise InvalidLayout(
                f"shape {self.shape} is empty or has too many dimensions",
                (self.name,),
                "If the trainer shards its parameters, gather them before export.",
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def module(self) -> str:
        """The module that the tensor belongs to, without PEFT's prefix: `model.layers.0.self_attn.q_proj`."""
        name = self.name.removeprefix("base_model.model.")
        for suffix in (*_DOWN_AND_UP, *_UP_AND_DOWN):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
        return name


@dataclass(frozen=True)
class AdapterLayout:
    """What stays the same from version to version: base model, PEFT config, tensors in packing order.

    `peft_config` is canonical JSON (sorted keys, sorted sets, enums as strings). The constructor refuses,
    with `InvalidLayout`, tensors that do not form complete LoRA pairs and nothing else: a payload of base
    weights is how a sync "succeeds" and loads nothing.
    """

    base_model: BaseModel
    peft_config: str
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.tensors:
            raise InvalidLayout("the adapter holds no tensors", remedy="Does the model have a LoRA adapter?")
        if len(self.tensors) > MAX_TENSORS:
            raise InvalidLayout(f"{len(self.tensors)} tensors are more than the limit of {MAX_TENSORS}")
        repeated = tuple(name for name, times in Counter(t.name for t in self.tensors).items() if times > 1)
        if repeated:
            raise InvalidLayout("tensor names appear twice", repeated)
        _check_pairs({tensor.name: tensor for tensor in self.tensors})
        object.__setattr__(self, "offsets", tuple(_pack(self.tensors)))
        if self.nbytes > MAX_PAYLOAD_BYTES:
            raise InvalidLayout(f"{self.nbytes} bytes are more than the limit of {MAX_PAYLOAD_BYTES}")

    @property
    def nbytes(self) -> int:
        """The size in bytes of the packed buffer, padding included."""
        return self.offsets[-1] + self.tensors[-1].nbytes

    @cached_property
    def modules(self) -> frozenset[str]:
        """Every module the adapter changes, full names without PEFT's prefix."""
        return frozenset(tensor.module for tensor in self.tensors)

    @cached_property
    def rank(self) -> int:
        """The largest LoRA rank of any module."""
        return max(_rank(tensor) for tensor in self.tensors)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The PEFT config as plain data."""
        decoded = json.loads(self.peft_config)
        if not isinstance(decoded, dict):
            raise InvalidLayout("the PEFT config is no JSON object")
        return decoded

    @cached_property
    def body(self) -> bytes:
        """The canonical bytes of the layout: what travels, what is journaled, what the digest names."""
        return json.dumps(
            {
                "base_model": [self.base_model.name, self.base_model.fingerprint],
                "peft_config": self.peft_config,
                "tensors": [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors],
            },
            separators=(",", ":"),
            sort_keys=True,
        ).encode()

    @cached_property
    def digest(self) -> str:
        return digest_of(self.body)

    @classmethod
    def from_body(cls, body: bytes) -> AdapterLayout:
        """The layout whose canonical bytes these are; raises `InvalidLayout` for anything else."""
        try:
            raw = json.loads(body)
            name, fingerprint = raw["base_model"]
            layout = cls(
                BaseModel(_text(name), _text(fingerprint)),
                _text(raw["peft_config"]),
                tuple(
                    TensorSpec(_text(tensor), _text(dtype), tuple(_size(n) for n in shape))
                    for tensor, dtype, shape in raw["tensors"]
                ),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidLayout(f"not a layout ({type(error).__name__}: {error})") from None
        if layout.body != body:
            raise InvalidLayout("a layout that is not in canonical form")
        return layout


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """One version's content: which layout, the digest and size of the packed bytes, how they are cut.

    `digest` is that of the packed buffer, `nbytes` its size, `tensors` the number of tensors in it.
    `step` is the trainer's own label; `chunk_bytes` is what both sides cut the buffer by.
    """

    layout: str
    digest: str
    nbytes: int
    tensors: int
    rank: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    step: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.nbytes > MAX_PAYLOAD_BYTES or self.tensors < 1 or self.rank < 1:
            raise InvalidLayout(f"a manifest of {self.nbytes} bytes, {self.tensors} tensors, rank {self.rank}")
        if self.chunk_bytes < 1:
            raise InvalidLayout(f"chunks of {self.chunk_bytes} bytes")

    @classmethod
    def of(
        cls, layout: AdapterLayout, digest: str, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, step: int | None = None
    ) -> AdapterManifest:
        return cls(layout.digest, digest, layout.nbytes, len(layout.tensors), layout.rank, chunk_bytes, step)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start, end) byte ranges, in the order they are sent."""
        return (
            (start, min(start + self.chunk_bytes, self.nbytes)) for start in range(0, self.nbytes, self.chunk_bytes)
        )


def _pack(tensors: Iterable[TensorSpec]) -> Iterator[int]:
    """Yield each tensor's offset in bytes: in order, each at the next multiple of `ALIGNMENT`."""
    position = 0
    for tensor in tensors:
        position = -(-position // ALIGNMENT) * ALIGNMENT
        yield position
        position += tensor.nbytes


def _check_pairs(tensors: dict[str, TensorSpec]) -> None:
    strangers, unpaired = [], []
    for name in tensors:
        for suffix, partner in (*_DOWN_AND_UP.items(), *_UP_AND_DOWN.items()):
            if name.endswith(suffix):
                if name.removesuffix(suffix) + partner not in tensors:
                    unpaired.append(name)
                break
        else:
            strangers.append(name)
    if strangers:
        raise InvalidLayout(
            "tensors that are not LoRA pairs cannot be served as an adapter",
            tuple(strangers),
            "Drop modules_to_save, biases, DoRA and base weights from the adapter, or serve a merged model.",
        )
    if unpaired:
        raise InvalidLayout("LoRA tensors without their partner", tuple(unpaired), "Send lora_A and lora_B together.")


def _rank(tensor: TensorSpec) -> int:
    """The LoRA rank that a tensor's shape states: the rows of A, the columns of B."""
    if tensor.name.endswith((".lora_A.weight", ".lora_embedding_A")):
        return tensor.shape[0]
    return tensor.shape[-1]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _size(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a size")
    return value
