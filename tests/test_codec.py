"""Events survive the wire exactly, and nothing else gets through."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.codec import EVENT_CODEC, MAJOR, MAX_FRAME_BYTES, MINOR
from bus.errors import CodecError, InvalidLayout
from bus.events import EVENTS, Attempt, Envelope, Event, LayoutDeclared, NodeReady, Peer, VersionCommitted
from bus.manifest import AdapterLayout, AdapterManifest, BaseModel, TensorSpec

READY = NodeReady(Attempt("policy", 7, 1, 3), Peer("node-0", "a1"))
INTEGERS = st.integers(-(2**63), 2**63 - 1)


def manifests() -> st.SearchStrategy[AdapterManifest]:
    positive = st.integers(1, 2**33)
    return st.builds(
        AdapterManifest, st.text(), st.text(), positive, positive, positive, positive, st.none() | INTEGERS
    )


for simple, strategy in {int: INTEGERS, float: st.floats(allow_nan=False), AdapterManifest: manifests()}.items():
    st.register_type_strategy(simple, strategy)


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS)
def test_every_event_round_trips(kind: type[Event]) -> None:
    @given(st.builds(kind), INTEGERS.filter(lambda n: n >= 0))
    def check(event: Event, sequence: int) -> None:
        envelope = Envelope("run", sequence, event, sequence)
        assert EVENT_CODEC.decode(EVENT_CODEC.encode(envelope)) == envelope

    check()


@given(st.binary(max_size=200))
def test_noise_is_a_codec_error_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(CodecError):
        EVENT_CODEC.decode(frame)


@given(st.data())
def test_a_damaged_frame_is_a_codec_error_or_another_well_formed_event(data: st.DataObject) -> None:
    frame = bytearray(EVENT_CODEC.encode(Envelope("run", 5, READY)))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = EVENT_CODEC.decode(bytes(frame))
    except CodecError:
        return
    assert EVENT_CODEC.decode(EVENT_CODEC.encode(decoded)) == decoded


def frame_of(kind: str, values: dict[str, Any], *, major: int = MAJOR, minor: int = MINOR) -> bytes:
    return bytes(msgpack.packb([major, minor, "run", 1, 0, kind, values]))


READY_FIELDS: dict[str, Any] = {
    "attempt": {"adapter": "policy", "version": 7, "number": 1, "view": 3},
    "peer": {"node": "node-0", "incarnation": "a1"},
}


def test_a_field_of_another_type_is_refused_by_name() -> None:
    """facts: msgpack does not check types, so version="seven" would pass."""
    wrong = {**READY_FIELDS, "attempt": {**READY_FIELDS["attempt"], "version": "seven"}}
    with pytest.raises(CodecError, match=r"NodeReady\.attempt\.version is a str, not a int"):
        EVENT_CODEC.decode(frame_of("NodeReady", wrong))


def test_a_bool_is_no_version() -> None:
    """B067."""
    wrong = {**READY_FIELDS, "attempt": {**READY_FIELDS["attempt"], "version": True}}
    with pytest.raises(CodecError, match="version is a bool"):
        EVENT_CODEC.decode(frame_of("NodeReady", wrong))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CodecError, match="unknown kind of event: RunThis"):
        EVENT_CODEC.decode(frame_of("RunThis", {}))


def test_an_unknown_field_is_refused_from_this_minor_and_left_out_from_a_newer_one() -> None:
    newer = {**READY_FIELDS, "mood": "good"}
    with pytest.raises(CodecError, match="no field 'mood'"):
        EVENT_CODEC.decode(frame_of("NodeReady", newer))
    assert EVENT_CODEC.decode(frame_of("NodeReady", newer, minor=MINOR + 1)).event == READY


def test_another_major_version_is_named() -> None:
    with pytest.raises(CodecError, match=f"speaks version {MAJOR + 1}"):
        EVENT_CODEC.decode(frame_of("NodeReady", READY_FIELDS, major=MAJOR + 1))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(CodecError, match="NodeReady lacks peer"):
        EVENT_CODEC.decode(frame_of("NodeReady", {"attempt": READY_FIELDS["attempt"]}))


@pytest.mark.parametrize("frame", [b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000])
def test_a_claim_of_gigabytes_or_endless_nesting_allocates_nothing(frame: bytes) -> None:
    """B103."""
    tracemalloc.start()
    with pytest.raises(CodecError):
        EVENT_CODEC.decode(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_an_extension_type_is_refused() -> None:
    """B005: nothing that could become code."""
    with pytest.raises(CodecError):
        EVENT_CODEC.decode(bytes(msgpack.packb(msgpack.ExtType(42, b"x"))))


def test_integer_map_keys_are_refused() -> None:
    """B038."""
    with pytest.raises(CodecError):
        EVENT_CODEC.decode(bytes(msgpack.packb([MAJOR, MINOR, "run", 1, 0, "NodeReady", {0: "n1"}])))


def test_values_that_are_not_plain_are_not_sent() -> None:
    """B067: a numpy or torch scalar is not a Python number."""

    class Scalar(int): ...

    with pytest.raises(CodecError, match="cannot be sent"):
        EVENT_CODEC.encode(Envelope("run", 1, VersionCommitted(Attempt("policy", Scalar(1), 1, 1), "d")))


def test_a_manifest_that_checks_itself_turns_into_a_codec_error() -> None:
    with pytest.raises(InvalidLayout):
        AdapterManifest("layout", "digest", -1, 1, 1)
    manifest = AdapterManifest("layout", "digest", 1, 1, 1)
    values = {field.name: getattr(manifest, field.name) for field in fields(manifest)} | {"nbytes": -1}
    frame = frame_of(
        "PublishRequested",
        {"peer": READY_FIELDS["peer"], "request": "r", "adapter": "policy", "manifest": values, "timeout": 1.0},
    )
    with pytest.raises(CodecError, match="-1 bytes"):
        EVENT_CODEC.decode(frame)


def test_a_layout_of_20_000_tensors_passes_and_a_frame_over_the_limit_is_refused_with_both_sizes() -> None:
    """B066."""
    tensors = [
        TensorSpec(
            f"base_model.model.model.layers.{n}.mlp.experts.{n}.gate_proj.lora_{side}.weight", "bfloat16", (8, 8)
        )
        for n in range(10_000)
        for side in "AB"
    ]
    layout = AdapterLayout(BaseModel("moe", "config:1"), "{}", tuple(tensors))
    declared = Envelope("run", 1, LayoutDeclared(layout.digest, layout.body))
    assert EVENT_CODEC.decode(EVENT_CODEC.encode(declared)) == declared
    too_large = Envelope("run", 1, LayoutDeclared("digest", b"x" * (MAX_FRAME_BYTES + 1)))
    with pytest.raises(CodecError, match=f"over the limit of {MAX_FRAME_BYTES}"):
        EVENT_CODEC.encode(too_large)
    with pytest.raises(CodecError, match=f"over the limit of {MAX_FRAME_BYTES}"):
        EVENT_CODEC.decode(b"x" * (MAX_FRAME_BYTES + 1))
