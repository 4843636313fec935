"""Layouts: what travels once, and what no adapter may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import InvalidLayout
from bus.manifest import ALIGNMENT, AdapterLayout, AdapterManifest, BaseModel, TensorSpec

BASE = BaseModel("base", "config:1")
A, B = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"


def pair(rank: int = 4, dtype: str = "float32") -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(A, dtype, (rank, 6)), TensorSpec(B, dtype, (5, rank))


def test_a_layout_survives_its_own_bytes_and_has_one_digest() -> None:
    layout = AdapterLayout(BASE, "{}", pair())
    again = AdapterLayout.from_body(layout.body)
    assert again == layout
    assert again.digest == layout.digest
    assert layout.rank == 4
    assert layout.modules == {"q_proj"}


@given(st.binary(max_size=100))
def test_bytes_that_are_no_layout_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidLayout):
        AdapterLayout.from_body(body)


def test_bytes_in_another_form_are_refused() -> None:
    """Two forms of one layout would have two digests."""
    with pytest.raises(InvalidLayout, match="canonical"):
        AdapterLayout.from_body(AdapterLayout(BASE, "{}", pair()).body.replace(b":", b": ", 1))


@given(st.lists(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]), min_size=1, max_size=5))
def test_tensors_lie_in_order_aligned_and_never_overlap(dtypes: list[str]) -> None:
    tensors = [
        TensorSpec(f"m{index}.lora_{side}.weight", dtype, (3, 3)) for index, dtype in enumerate(dtypes) for side in "AB"
    ]
    layout = AdapterLayout(BASE, "{}", tuple(tensors))
    ends = [offset + tensor.nbytes for offset, tensor in zip(layout.offsets, tensors, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert layout.nbytes == ends[-1]


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_chunks_cover_every_byte_once(nbytes: int, chunk: int) -> None:
    chunks = list(AdapterManifest("l", "d", nbytes, 2, 4, chunk).chunks())
    assert [start for start, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == nbytes


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "no tensors"),
        ((pair()[0],), "without their partner"),
        ((*pair(), pair()[0]), "appear twice"),
        ((*pair(), TensorSpec("lm_head.weight", "float32", (2, 2))), "not LoRA pairs"),
        ((*pair(), TensorSpec("q_proj.base_layer.weight", "float32", (2, 2))), "not LoRA pairs"),
    ],
)
def test_what_no_server_could_serve_is_no_layout(tensors: tuple[TensorSpec, ...], message: str) -> None:
    """B003, B018, B072."""
    with pytest.raises(InvalidLayout, match=message):
        AdapterLayout(BASE, "{}", tensors)


@pytest.mark.parametrize(("dtype", "shape"), [("int16", (2,)), ("float32", (0,)), ("float32", ())])
def test_a_tensor_that_cannot_travel_is_named(dtype: str, shape: tuple[int, ...]) -> None:
    """B012: an empty tensor is a sharded one."""
    with pytest.raises(InvalidLayout, match="lora_A"):
        TensorSpec(A, dtype, shape)
