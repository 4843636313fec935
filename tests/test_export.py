"""What leaves a PEFT model is what PEFT would save, in an order and a config that are the same on every run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import LoraRuntimeConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bus.base_model import base_model_at
from bus.errors import InvalidInput, InvalidLayout
from bus.manifest import AdapterLayout
from trainer_node.adapter_directory import read_adapter_directory
from trainer_node.export import export_adapter

_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    directory = tmp_path_factory.mktemp("base") / "tiny"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def _adapted(base_path: Path, *, adapter: str = "default", seed: int = 0, **lora: Any) -> Any:
    """A PEFT model on the tiny base, every adapter weight random."""
    torch.manual_seed(seed)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | lora
    base = LlamaForCausalLM.from_pretrained(base_path, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(**lora), adapter_name=adapter)
    return _randomised(model)


def _randomised(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model


# ------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": {"v_proj", "q_proj"}},
        {"target_modules": r".*\.layers\.0\.mlp\.(up|down)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ],
)
def test_names_shapes_and_values_are_those_that_peft_saves(base_path: Path, tmp_path: Path, lora: Any) -> None:
    model = _adapted(base_path, **lora)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    exported = export_adapter(model)
    assert list(exported.tensors) == [tensor.name for tensor in exported.layout.tensors] == sorted(saved)
    for tensor in exported.layout.tensors:
        assert tensor.dtype == "bfloat16"
        assert tensor.shape == tuple(saved[tensor.name].shape)
        assert torch.equal(exported.tensors[tensor.name], saved[tensor.name])


@pytest.mark.parametrize("lora", [{}, {"target_modules": "all-linear"}, {"rank_pattern": {"v_proj": 2}}])
def test_a_saved_directory_equals_the_live_export(base_path: Path, tmp_path: Path, lora: Any) -> None:
    model = _adapted(base_path, lora_dropout=0.1, **lora)
    model.save_pretrained(tmp_path)
    live, read = export_adapter(model), read_adapter_directory(tmp_path).load()
    assert read.layout == live.layout
    assert read.layout.digest == live.layout.digest
    assert list(read.tensors) == list(live.tensors)
    assert all(torch.equal(read.tensors[name], live.tensors[name]) for name in live.tensors)


def test_the_layout_survives_its_own_bytes(base_path: Path) -> None:
    layout = export_adapter(_adapted(base_path)).layout
    assert AdapterLayout.from_body(layout.body) == layout


def test_another_peft_model_takes_the_tensors_bit_for_bit(base_path: Path) -> None:
    sent = export_adapter(_adapted(base_path, target_modules="all-linear", seed=1)).tensors
    other = _adapted(base_path, target_modules="all-linear", seed=2)
    result = set_peft_model_state_dict(other, {name: tensor.clone() for name, tensor in sent.items()})
    assert not result.unexpected_keys
    received = get_peft_model_state_dict(other, save_embedding_layers=False)
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], sent[name]) for name in sent)


def test_nothing_is_copied_and_nothing_is_tracked(base_path: Path) -> None:
    model = _adapted(base_path)
    live = {parameter.data_ptr() for parameter in model.parameters()}
    tensors = export_adapter(model).tensors.values()
    assert all(tensor.data_ptr() in live and not tensor.requires_grad for tensor in tensors)


def test_the_dtype_is_the_bases_unless_another_is_asked_for(base_path: Path) -> None:
    model = _adapted(base_path)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16, torch.float32}
    assert export_adapter(model).layout.tensors[0].dtype == "bfloat16"
    assert export_adapter(model, dtype=torch.float16).layout.tensors[0].dtype == "float16"
    assert export_adapter(model.to(torch.float32)).layout.tensors[0].dtype == "float32"


def test_the_base_is_identified_as_a_server_identifies_it(base_path: Path) -> None:
    assert export_adapter(_adapted(base_path)).layout.base_model == base_model_at(str(base_path))


def test_a_base_made_in_memory_is_identified_by_its_config(base_path: Path) -> None:
    base = LlamaForCausalLM(LlamaConfig.from_pretrained(base_path, name_or_path=""))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    assert export_adapter(model).layout.base_model.fingerprint == base_model_at(str(base_path)).fingerprint[:23]


def test_the_layout_is_built_once(base_path: Path) -> None:
    model = _adapted(base_path)
    first = export_adapter(model).layout
    _randomised(model)
    assert export_adapter(model).layout is first
    assert export_adapter(_adapted(base_path, lora_alpha=9)).layout is not first


# ------------------------------------------------------------------------------------------- the config


def test_config_is_plain_json_with_sorted_modules(base_path: Path) -> None:
    """B020: sets and enums and nested configs do not serialise."""
    model = _adapted(
        base_path,
        target_modules={"v_proj", "q_proj"},
        task_type=TaskType.CAUSAL_LM,
        runtime_config=LoraRuntimeConfig(ephemeral_gpu_offload=False),
    )
    assert export_adapter(model).layout.config == {
        "alpha_pattern": {},
        "bias": "none",
        "lora_alpha": 8,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


_PRINT_DIGEST = """
import sys
from pathlib import Path
from test_export import _LINEAR, _adapted
from trainer_node.export import export_adapter
print(export_adapter(_adapted(Path(sys.argv[1]), target_modules=set(_LINEAR))).layout.digest)
"""


def test_layout_bytes_do_not_depend_on_the_hash_seed(base_path: Path) -> None:
    """B020: identical bytes on every run."""
    tests = Path(__file__).parent
    elsewhere = subprocess.run(
        [sys.executable, "-c", _PRINT_DIGEST, str(base_path)],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert elsewhere == export_adapter(_adapted(base_path, target_modules=set(_LINEAR))).layout.digest


@pytest.mark.parametrize("targets", ["all-linear", _LINEAR, set(_LINEAR), r".*\.(\w+)_proj"])
def test_target_modules_come_from_the_tensors(base_path: Path, targets: Any) -> None:
    """B044: a shorthand, a regex and full paths all mean the same modules."""
    config = export_adapter(_adapted(base_path, target_modules=targets)).layout.config
    assert config["target_modules"] == sorted(_LINEAR)


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 8.0)])
def test_the_receiver_computes_the_trainers_scale(base_path: Path, use_rslora: bool, scale: float) -> None:
    """B046, B061: alpha over r, or over its root; the update then equals PEFT's own delta."""
    model = _adapted(base_path, r=16, lora_alpha=32, use_rslora=use_rslora)
    exported = export_adapter(model)
    config = exported.layout.config
    received = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    assert received == scale
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    delta = exported.tensors[f"{name}.lora_B.weight"] @ exported.tensors[f"{name}.lora_A.weight"] * received
    assert torch.allclose(delta, model.get_submodule(name).get_delta_weight("default"))


def test_patterns_keep_their_order(base_path: Path) -> None:
    """PEFT takes the first pattern that matches, so sorting them would change ranks."""
    patterns = {"v_proj": 2, r"layers\.0\.self_attn\.v_proj": 3}
    layout = export_adapter(_adapted(base_path, rank_pattern=patterns)).layout
    assert list(layout.config["rank_pattern"].items()) == list(patterns.items())
    assert layout.rank == 4


# --------------------------------------------------------------------------------------- adapters, wrappers


def test_each_adapter_has_its_own_values(base_path: Path) -> None:
    """B065: a second adapter with another rank neither leaks nor wins."""
    model = _adapted(base_path)
    model.add_adapter("wide", LoraConfig(r=8, lora_alpha=1, target_modules=["k_proj"]))
    narrow, wide = export_adapter(model, "default"), export_adapter(model, "wide")
    assert (narrow.layout.rank, narrow.layout.config["lora_alpha"]) == (4, 8)
    assert (wide.layout.rank, wide.layout.config["lora_alpha"]) == (8, 1)
    assert wide.layout.config["target_modules"] == ["k_proj"]
    assert not narrow.tensors.keys() & wide.tensors.keys()


@pytest.mark.parametrize("adapter", ["weight", "lora_A", "lora_B", "q_proj", "policy"])
def test_an_adapters_name_is_not_in_the_tensors_names(base_path: Path, adapter: str) -> None:
    """B033: not even a name that looks like part of a tensor's, and not beside another adapter."""
    expected = export_adapter(_adapted(base_path))
    model = _adapted(base_path, adapter=adapter)
    assert export_adapter(model).layout == expected.layout
    model.add_adapter("other", LoraConfig(r=8, target_modules=["k_proj"]))
    exported = export_adapter(model, adapter)
    assert exported.layout == expected.layout
    assert all(torch.equal(exported.tensors[name], expected.tensors[name]) for name in expected.tensors)


class _Wrapped(nn.Module):
    """The shape of DistributedDataParallel: the model is its `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _compiled_and_wrapped(model: Any) -> nn.Module:
    compiled: Any = torch.compile(model)
    return _Wrapped(compiled)


def _compiled_inside(model: Any) -> Any:
    model.base_model.model = torch.compile(model.base_model.model)
    return model


@pytest.mark.parametrize("wrap", [torch.compile, _Wrapped, _compiled_and_wrapped])
def test_wrappers_leave_no_trace(base_path: Path, wrap: Any) -> None:
    """B052: `_orig_mod.` and `module.` in front of every key match nothing on load."""
    model = _adapted(base_path)
    expected = export_adapter(model).layout
    assert export_adapter(wrap(model)).layout == expected


def test_a_compiled_base_leaves_no_trace(base_path: Path) -> None:
    """B052: nor does `_orig_mod.` in the middle."""
    model = _adapted(base_path)
    expected = export_adapter(model)
    assert export_adapter(_compiled_inside(model)).tensors.keys() == expected.tensors.keys()


def test_several_adapters_must_be_chosen_from(base_path: Path) -> None:
    model = _adapted(base_path)
    model.add_adapter("reference", LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(InvalidInput, match=r"several adapters \(default, reference\); say which"):
        export_adapter(model)
    with pytest.raises(InvalidInput, match="no adapter 'policy'; it has default, reference"):
        export_adapter(model, "policy")


# ------------------------------------------------------------------------------------------- refusals


def test_a_model_without_peft_is_refused(base_path: Path) -> None:
    with pytest.raises(InvalidInput, match="LlamaForCausalLM is not a PEFT model; wrap it"):
        export_adapter(LlamaForCausalLM.from_pretrained(base_path))


def test_an_adapter_that_is_not_lora_is_refused(base_path: Path) -> None:
    from peft import IA3Config

    base = LlamaForCausalLM.from_pretrained(base_path)
    model = get_peft_model(base, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(InvalidInput, match="only LORA can be served"):
        export_adapter(model)


@pytest.mark.parametrize(
    ("lora", "problem", "key"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "base_model.model.lm_head.weight"),
        (
            {"use_dora": True},
            "use_dora",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight",
        ),
        ({"lora_bias": True}, "lora_bias", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"),
        (
            {"trainable_token_indices": [1]},
            "trainable_token_indices",
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        ),
    ],
)
def test_what_no_server_can_add_is_refused_by_its_keys(base_path: Path, lora: Any, problem: str, key: str) -> None:
    """B003, B056: full modules and DoRA are refused, never filtered out."""
    with pytest.raises(InvalidLayout, match=f"cannot serve {problem}=") as caught:
        export_adapter(_adapted(base_path, **lora))
    assert key in caught.value.names
    assert all(".lora_A.weight" not in name for name in caught.value.names)


def test_trained_biases_are_refused(base_path: Path) -> None:
    with pytest.raises(InvalidLayout, match="bias='all'"):
        export_adapter(_adapted(base_path, bias="all"))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_a_start_that_changes_the_base_is_refused(base_path: Path, start: str) -> None:
    """B035, B058: the adapter is right only on the base that its own initialisation changed."""
    base = LlamaForCausalLM.from_pretrained(base_path)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start))
    with pytest.raises(InvalidLayout, match="changes the base weights"):
        export_adapter(model)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_a_start_that_leaves_the_base_alone_passes(base_path: Path, start: Any) -> None:
    """B058."""
    model = _adapted(base_path)
    model.peft_config["default"].init_lora_weights = start
    assert export_adapter(model).layout == export_adapter(_adapted(base_path)).layout


def _part(model: Any, kind: str) -> Any:
    return getattr(model.get_submodule("base_model.model.model.layers.1.self_attn.v_proj"), kind)


def test_an_empty_tensor_is_refused_with_the_shape_it_should_have(base_path: Path) -> None:
    """B012: what ZeRO-3 leaves outside a gather."""
    model = _adapted(base_path)
    _part(model, "lora_A")["default"].weight.data = torch.empty(0)
    with pytest.raises(InvalidLayout, match=r"v_proj\.lora_A\.weight \(0,\), expected \(4, in\)") as caught:
        export_adapter(model)
    assert "gather them before export" in str(caught.value)
    assert len(caught.value.names) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(base_path: Path, value: float, dtype: torch.dtype) -> None:
    model = _adapted(base_path)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.to(dtype)
    _part(model, "lora_B")["default"].weight.data[3, 1] = value
    with pytest.raises(InvalidLayout, match="NaN, infinite") as caught:
        export_adapter(model, dtype=torch.bfloat16)
    assert caught.value.names == ("base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight",)


def test_a_weight_that_overflows_on_the_wire_is_refused(base_path: Path) -> None:
    model = _adapted(base_path)
    _part(model, "lora_B")["default"].weight.data[3, 1] = -70_000
    export_adapter(model)
    with pytest.raises(InvalidLayout, match=r"beyond torch\.float16"):
        export_adapter(model, dtype=torch.float16)


def test_half_a_pair_is_refused(base_path: Path) -> None:
    model = _adapted(base_path)
    del _part(model, "lora_B")["default"]
    with pytest.raises(InvalidLayout, match="without their partner"):
        export_adapter(model)


def test_weights_of_another_kind_are_refused(base_path: Path) -> None:
    model = _adapted(base_path)
    _part(model, "lora_B")["default"].to(torch.float64)
    with pytest.raises(InvalidLayout, match=r"LoRA weights of torch\.float64"):
        export_adapter(model)


def test_a_resized_vocabulary_is_refused(base_path: Path) -> None:
    model = _adapted(base_path)
    model.get_base_model().resize_token_embeddings(130)
    with pytest.raises(InvalidLayout, match="resized to 130 from the 128"):
        export_adapter(model)


# ----------------------------------------------------------------------------------------- directories


@pytest.fixture
def saved(base_path: Path, tmp_path: Path) -> Path:
    _adapted(base_path).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def _configure(directory: Path, **changes: object) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _rename(directory: Path, rename: Any) -> None:
    file = directory / "adapter_model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)


def test_the_base_can_be_named_by_hand(base_path: Path, saved: Path) -> None:
    expected = read_adapter_directory(saved).layout
    _configure(saved, base_model_name_or_path="gone/elsewhere")
    assert read_adapter_directory(saved, base_model=str(base_path)).layout == expected


@pytest.mark.parametrize("adapter", ["default", "weight", "lora_A"])
def test_names_of_a_raw_state_dict_are_read_as_pefts_own(saved: Path, adapter: str) -> None:
    """B033, B052: with the adapter's name inside and a compiled model's prefix in front."""
    expected = read_adapter_directory(saved).layout
    _rename(saved, lambda name: "_orig_mod." + name.removesuffix("weight") + f"{adapter}.weight")
    assert read_adapter_directory(saved).layout == expected


def test_a_dotted_adapter_name_is_refused_not_mangled(saved: Path) -> None:
    """B033."""
    _rename(saved, lambda name: name.removesuffix("weight") + "a.b.weight")
    with pytest.raises(InvalidLayout, match="not LoRA pairs"):
        read_adapter_directory(saved)


@pytest.mark.parametrize("extra", ["lm_head.base_layer.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"])
def test_base_weights_in_the_payload_are_refused(saved: Path, extra: str) -> None:
    """B018, B072."""
    file = saved / "adapter_model.safetensors"
    save_file({**load_file(file), f"base_model.model.{extra}": torch.ones(2, 2)}, file)
    with pytest.raises(InvalidLayout, match=r"not LoRA pairs.*base_layer\.weight"):
        read_adapter_directory(saved)


def test_a_config_of_another_rank_is_refused(saved: Path) -> None:
    _configure(saved, r=16)
    with pytest.raises(InvalidLayout, match=r"\(4, 64\), expected \(16, in\)"):
        read_adapter_directory(saved)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "IA3"}, "type is IA3; only LORA"),
        ({"base_model_name_or_path": None}, "does not say which base model"),
        ({"base_model_name_or_path": "no/such"}, "adapter .*: base model 'no/such' is neither"),
        ({"r": "four"}, "config's r is 'four'; it must be a number"),
        ({"lora_alpha": None}, "config's lora_alpha is None"),
        ({"rank_pattern": ["q_proj"]}, "config's rank_pattern is not a mapping"),
        ({"alpha_pattern": {"(": 1}}, "config's alpha_pattern is not a mapping"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_sentence(saved: Path, changes: Any, problem: str) -> None:
    _configure(saved, **changes)
    with pytest.raises(InvalidInput, match=problem):
        read_adapter_directory(saved)


def test_reading_a_directory_needs_no_torch() -> None:
    """A push that is refused answers within two seconds, and importing torch and PEFT takes longer."""
    code = "import sys, trainer_node.adapter_directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_publishing_a_directory_needs_no_peft() -> None:
    code = "import sys, trainer_node.publisher, trainer_node.exported; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"no adapter directory {tmp_path / 'gone'}"):
        read_adapter_directory(tmp_path / "gone")


def test_the_directory_above_an_adapter_points_to_it(saved: Path) -> None:
    with pytest.raises(InvalidInput, match=f"holds no adapter_config.json; did you mean {saved}"):
        read_adapter_directory(saved.parent)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("adapter_config.json", b"{", r"adapter_config\.json cannot be read"),
        ("adapter_config.json", b"[]", "holds no JSON object"),
        ("adapter_model.safetensors", b"pickle?", "not a complete safetensors file"),
    ],
)
def test_a_damaged_file_is_named(saved: Path, file: str, content: bytes, problem: str) -> None:
    (saved / file).write_bytes(content)
    with pytest.raises(InvalidInput, match=problem):
        read_adapter_directory(saved)


def test_missing_weights_are_named(saved: Path) -> None:
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"holds no adapter_model\.safetensors"):
        read_adapter_directory(saved)
    (saved / "adapter_model.bin").touch()
    with pytest.raises(InvalidInput, match="pickled weights"):
        read_adapter_directory(saved)


def test_a_loaded_adapter_exports_as_its_directory(base_path: Path, saved: Path) -> None:
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base_path), saved)
    assert export_adapter(model).layout == read_adapter_directory(saved).layout
