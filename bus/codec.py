"""Events to bytes and back: msgpack, strict and bounded; the only module that decodes a frame.

A frame is `[major, minor, run, sequence, previous, kind, fields]`, fields a map from name to value. Decoding
checks every value against the annotation of its field, so a peer cannot hand us a string where a version belongs;
sizes and depth are bounded before anything is allocated. A frame of a newer minor version may hold fields we do
not know: they are left out. Nothing here can run code: no pickle, no extension types.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final

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
        return Envelope(run, sequence, self._build(cls, values, kind, lenient=minor > MINOR), previous)

    def _build(self, cls: type[Any], values: object, where: str, *, lenient: bool) -> Any:
        if not isinstance(values, dict):
            raise CodecError(f"{where} is not a map of fields")
        hints = _hints(cls)
        known = {}
        for name, value in values.items():
            if name in hints:
                known[name] = self._check(hints[name], value, f"{where}.{name}", lenient)
            elif not lenient:
                raise CodecError(f"{where} has no field {str(name)[:64]!r}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.init and f.name not in known]
        if missing:
            raise CodecError(f"{where} lacks {', '.join(missing)}")
        try:
            return cls(**known)
        except BusError as error:
            raise CodecError(f"{where}: {error}") from None

    def _check(self, hint: Any, value: object, where: str, lenient: bool) -> Any:
        origin = typing.get_origin(hint)
        if origin is tuple:
            return self._check_tuple(typing.get_args(hint), value, where, lenient)
        if origin in (typing.Union, types.UnionType):
            inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
            return None if value is None else self._check(inner[0], value, where, lenient)
        if is_dataclass(hint):
            return self._build(typing.cast(type[Any], hint), value, where, lenient=lenient)
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            try:
                return hint(typing.cast(str, value))
            except ValueError:
                raise CodecError(f"{where} is not a {hint.__name__}: {str(value)[:64]!r}") from None
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint:
            raise CodecError(f"{where} is a {type(value).__name__}, not a {hint.__name__}")
        return value

    def _check_tuple(self, args: tuple[Any, ...], value: object, where: str, lenient: bool) -> tuple[Any, ...]:
        if not isinstance(value, tuple):
            raise CodecError(f"{where} is a {type(value).__name__}, not a list")
        if args[-1] is Ellipsis:
            return tuple(self._check(args[0], item, where, lenient) for item in value)
        if len(value) != len(args):
            raise CodecError(f"{where} has {len(value)} items, not {len(args)}")
        return tuple(self._check(arg, item, where, lenient) for arg, item in zip(args, value, strict=True))


def _plain(value: Any) -> Any:
    """Dataclasses as maps, enums as strings, everything else as it is; numpy's and torch's scalars are refused."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if type(value) is int and value in _INT64:
        return value
    raise CodecError(f"{value!r} of type {type(value).__name__} cannot be sent")


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    """The annotations of a dataclass, resolved once: resolving costs more than decoding."""
    if cls not in _HINTS:
        resolved = typing.get_type_hints(cls)
        _HINTS[cls] = {f.name: resolved[f.name] for f in fields(cls) if f.init}
    return _HINTS[cls]


EVENT_CODEC: Final = Codec(EVENTS)
"""The vocabulary of the bus and of the journal."""
