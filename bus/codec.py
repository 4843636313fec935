"""Events to bytes and back: msgpack, strict and bounded; the only module that decodes a frame.

A frame is `[major, minor, run, sequence, previous, kind, fields]`, fields a map from name to value. Decoding
checks every value against the annotation of its field, so a peer cannot hand us a string where a version belongs;
sizes and depth are bounded before anything is allocated. A frame of a newer minor version may hold fields we do
not know: they are left out. Nothing here can run code: no pickle, no extension types.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Final, TypeAlias

import msgpack

from bus.errors import BusError, CodecError
from bus.events import EVENTS, Envelope

MAJOR: Final = 1
MINOR: Final = 0

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""The largest frame: a layout of 200,000 tensors fits."""

MAX_ITEMS: Final = 65_536
"""The longest list and the largest map inside a frame."""

MAX_TEXT_BYTES: Final = 65_536
"""The longest string inside a frame; only `bytes` fields may be longer."""

_INT64: Final = range(-(2**63), 2**63)


class Codec:
    """Encodes and decodes the dataclasses of one vocabulary, named by their keys in `kinds`."""

    def __init__(self, kinds: Mapping[str, type[Any]]) -> None:
        self._kinds = dict(kinds)

    def encode(self, envelope: Envelope) -> bytes:
        """One frame; raises `CodecError` for an event outside the vocabulary or beyond the limits."""
        kind = type(envelope.event).__name__
        if self._kinds.get(kind) is not type(envelope.event):
            raise CodecError(f"{kind} is not an event of this vocabulary")
        frame = msgpack.packb(
            [MAJOR, MINOR, envelope.run, envelope.sequence, envelope.previous, kind, _plain(envelope.event)],
            use_bin_type=True,
        )
        if len(frame) > MAX_FRAME_BYTES:
            raise CodecError(f"{kind} of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        return bytes(frame)

    def decode(self, frame: bytes) -> Envelope:
        """The event in a frame; raises `CodecError` that names the kind and field for anything else."""
        if len(frame) > MAX_FRAME_BYTES:
            raise CodecError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            raw = msgpack.unpackb(
                frame,
                raw=False,
                use_list=False,
                strict_map_key=True,
                max_str_len=MAX_TEXT_BYTES,
                max_bin_len=MAX_FRAME_BYTES,
                max_array_len=MAX_ITEMS,
                max_map_len=MAX_ITEMS,
                max_ext_len=0,
            )
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError, OverflowError) as error:
            raise CodecError(f"not msgpack within limits: {type(error).__name__} {error}") from None
        match raw:
            case (int(major), *_) if major != MAJOR:
                raise CodecError(f"the frame speaks version {major} of the protocol, this release speaks {MAJOR}")
            case (int(), int(minor), str(run), int(sequence), int(previous), str(kind), dict(values)):
                if sequence < 0 or previous < 0:
                    raise CodecError("a frame with a negative sequence")
            case _:
                raise CodecError("a frame without the seven parts of an envelope")
        cls = self._kinds.get(kind)
        if cls is None:
            raise CodecError(f"unknown kind of event: {kind[:64]}")
        return Envelope(run, sequence, _read_dataclass(cls, values, kind, minor > MINOR), previous)


_Reader: TypeAlias = Callable[[Any, str, bool], Any]
"""Checks a value against one annotation, and returns it as that; told where it stands and whether to be lenient."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a dataclass: values of exactly the type `plain` pass as they are, others go through `read`."""

    plain: type[Any]
    read: _Reader
    is_required: bool


@cache
def _fields(cls: Any) -> dict[str, _Field]:
    """The fields of a dataclass, looked into once: resolving annotations costs more than decoding."""
    hints = typing.get_type_hints(cls)
    return {f.name: _Field(hints[f.name], _reader(hints[f.name]), f.default is MISSING) for f in fields(cls) if f.init}


@cache
def _reader(hint: Any) -> _Reader:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return partial(_read_tuple, args)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_reader(arg) for arg in args if arg is not types.NoneType)
        return lambda value, where, lenient: None if value is None else inner(value, where, lenient)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_read_dataclass, hint)
    return partial(_read_enum if issubclass(hint, StrEnum) else _read_plain, hint)


def _read_dataclass(cls: Any, values: Any, where: str, lenient: bool) -> Any:
    if not isinstance(values, dict):
        raise CodecError(f"{where} is not a map of fields")
    known = _fields(cls)
    read = {}
    for name, value in values.items():
        if (field := known.get(name)) is not None:
            read[name] = value if type(value) is field.plain else field.read(value, f"{where}.{name}", lenient)
        elif not lenient:
            raise CodecError(f"{where} has no field {str(name)[:64]!r}")
    if len(read) < len(known) and (
        missing := [name for name, field in known.items() if field.is_required and name not in read]
    ):
        raise CodecError(f"{where} lacks {', '.join(missing)}")
    try:
        return cls(**read)
    except BusError as error:
        raise CodecError(f"{where}: {error}") from None


def _read_tuple(args: tuple[Any, ...], value: Any, where: str, lenient: bool) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise CodecError(f"{where} is a {type(value).__name__}, not a list")
    if args[-1] is Ellipsis:
        read = _reader(args[0])
        return tuple(read(item, where, lenient) for item in value)
    if len(value) != len(args):
        raise CodecError(f"{where} has {len(value)} items, not {len(args)}")
    return tuple(_reader(arg)(item, where, lenient) for arg, item in zip(args, value, strict=True))


def _read_enum(kind: type[StrEnum], value: Any, where: str, lenient: bool) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise CodecError(f"{where} is not a {kind.__name__}: {str(value)[:64]!r}") from None


def _read_plain(kind: type[Any], value: Any, where: str, lenient: bool) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise CodecError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    return value


_AS_THEY_ARE: Final = frozenset((str, float, bool, bytes, types.NoneType))


def _plain(value: Any) -> Any:
    """Dataclasses as maps, enums as strings, everything else as it is; numpy's and torch's scalars are refused."""
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is int and value in _INT64):
        return value
    if is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in _fields(kind)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    raise CodecError(f"{value!r} of type {kind.__name__} cannot be sent")


EVENT_CODEC: Final = Codec(EVENTS)
"""The vocabulary of the bus and of the journal."""
