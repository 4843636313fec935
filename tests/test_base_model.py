"""The fingerprint of a base model: equal for equal models however they are stored, different for different ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bus.base_model import base_model_at, fingerprint
from bus.errors import InvalidInput
from bus.manifest import BaseModel


def _model(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    _model().save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "elsewhere"))


def _edit(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_name_is_the_directory_and_fingerprint_has_both_parts(saved: Path) -> None:
    base = base_model_at(str(saved))
    assert base.name == "tiny"
    config, weights = base.fingerprint.split("/")
    assert len(config.removeprefix("config:")) == len(weights.removeprefix("weights:")) == 16


def test_sharding_makes_no_difference(saved: Path, tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert base_model_at(str(tmp_path / "sharded")).fingerprint == base_model_at(str(saved)).fingerprint


def test_files_beside_the_model_make_no_difference(saved: Path, copy: Path) -> None:
    save_file({"lora": torch.ones(2)}, copy / "adapter_model.safetensors")
    assert base_model_at(str(copy)).fingerprint == base_model_at(str(saved)).fingerprint


def test_storing_a_tied_output_layer_makes_no_difference(tmp_path: Path) -> None:
    _model(tied=True).save_pretrained(tmp_path)
    before = base_model_at(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert base_model_at(str(tmp_path)) == before


def test_what_a_release_of_transformers_changes_makes_no_difference(saved: Path, copy: Path) -> None:
    def older(config: dict[str, object]) -> None:
        config.update(transformers_version="4.40.0", torch_dtype="bfloat16", use_cache=False, rope_theta=10000.0)
        for key in ("dtype", "rope_parameters", "head_dim", "num_key_value_heads"):
            config.pop(key, None)

    _edit(copy / "config.json", older)
    assert base_model_at(str(copy)).fingerprint == base_model_at(str(saved)).fingerprint


def test_a_live_config_agrees_with_the_saved_one(saved: Path) -> None:
    assert fingerprint(_model().config.to_dict(), saved) == base_model_at(str(saved)).fingerprint


def test_other_weights_of_one_architecture_differ(saved: Path, tmp_path: Path) -> None:
    _model(seed=1).save_pretrained(tmp_path)
    other, ours = base_model_at(str(tmp_path)).fingerprint, base_model_at(str(saved)).fingerprint
    assert other.split("/")[0] == ours.split("/")[0]
    assert not BaseModel("x", other).matches(BaseModel("y", ours))


def test_one_changed_tensor_differs(saved: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors")
    assert not base_model_at(str(copy)).matches(base_model_at(str(saved)))


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 129), ("num_hidden_layers", 3), ("model_type", "qwen2")])
def test_another_architecture_differs(saved: Path, copy: Path, key: str, value: object) -> None:
    _edit(copy / "config.json", lambda config: config.update({key: value}))
    assert not base_model_at(str(copy)).matches(base_model_at(str(saved)))


def test_the_language_model_of_a_multimodal_config_counts() -> None:
    def outer(layers: int) -> str:
        return fingerprint({"model_type": "gemma3", "text_config": {"num_hidden_layers": layers}}, None)

    assert outer(2) != outer(3)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("config:1", "config:1", True),
        ("config:1", "config:2", False),
        ("config:1/weights:1", "config:1", True),
        ("config:1/weights:1", "config:2", False),
        ("config:1/weights:1", "config:1/weights:1", True),
        ("config:1/weights:1", "config:1/weights:2", False),
    ],
)
def test_weights_are_compared_where_both_sides_know_them(a: str, b: str, same: bool) -> None:
    assert BaseModel("x", a).matches(BaseModel("y", b)) is same
    assert BaseModel("x", b).matches(BaseModel("y", a)) is same


def test_a_downloaded_hub_id_is_found_and_keeps_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "models--some--tiny"
    shutil.copytree(saved, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    base = base_model_at("some/tiny")
    assert base.name == "some/tiny"
    assert base.fingerprint == base_model_at(str(saved)).fingerprint


@pytest.mark.parametrize("missing", ["", "no/such-model", "/no/such/place", "not a hub id"])
def test_a_model_that_is_not_here_is_named(missing: str) -> None:
    with pytest.raises(InvalidInput, match=f"base model '{missing}' is neither"):
        base_model_at(missing)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no model directory: it holds no config\.json"):
        base_model_at(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{?",
        (10).to_bytes(8, "little") + b'{"a": [1]}',
    ],
)
def test_a_damaged_file_is_one_sentence(copy: Path, content: bytes) -> None:
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"model\.safetensors is not a complete safetensors file"):
        base_model_at(str(copy))


def test_a_truncated_file_is_one_sentence(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InvalidInput, match="the file ends inside"):
        base_model_at(str(copy))


def test_a_missing_shard_is_one_sentence(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(InvalidInput, match="not a complete safetensors file"):
        base_model_at(str(tmp_path))


def test_a_damaged_config_is_one_sentence(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"config\.json cannot be read"):
        base_model_at(str(copy))
