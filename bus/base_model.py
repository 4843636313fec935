"""Which base model an adapter sits on: a fingerprint that trainer and server work out for themselves.

It names the architecture (a digest of a few keys of `config.json`) and the weights (a digest of a sample of
every tensor), so that two copies of one model agree however they are named, sharded or saved, and an adapter
never lands on a model it was not trained on. Only headers and a few bytes per tensor are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from bus.errors import InvalidInput
from bus.manifest import BaseModel, digest_of

_ARCHITECTURE_KEYS: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "d_model",
    "n_embd",
    "n_layer",
    "n_head",
)
"""Keys that every release of transformers writes alike; rope, dtype and the like move from release to release."""

_SAMPLE_BYTES: Final = 256
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""

_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def fingerprint(config: Mapping[str, object], weights: Path | None) -> str:
    """The identity of a base model: `config:<16 hex>`, and `/weights:<16 hex>` where there are safetensors files.

    `config` is the content of a `config.json`, `weights` the directory with the files. Sharding, tied output
    weights and whatever release of transformers saved the files make no difference. Raises `InvalidInput` for
    a file that is missing or damaged.
    """
    text = config.get("text_config")  # a multimodal model keeps its language model's keys one level down
    keys = {**(text if isinstance(text, Mapping) else {}), **config}
    architecture = [[key, keys[key]] for key in _ARCHITECTURE_KEYS if keys.get(key) is not None]
    if keys.get("num_key_value_heads") is None and keys.get("num_attention_heads") is not None:
        architecture.append(["num_key_value_heads", keys["num_attention_heads"]])  # how configs before GQA are read
    identity = f"config:{_short_digest(sorted(architecture))}"
    files = _weight_files(weights) if weights is not None else []
    if not files:
        return identity
    samples: dict[str, list[object]] = {}
    for file in files:
        samples.update(_samples(file))
    # A tied output layer is a copy of the embedding, which some releases store and others leave out.
    if samples.get("lm_head.weight") in [sample for name, sample in samples.items() if name != "lm_head.weight"]:
        del samples["lm_head.weight"]
    return f"{identity}/weights:{_short_digest(sorted(samples.items()))}"


def base_model_at(path_or_id: str) -> BaseModel:
    """The identity of the model in a local directory, or of a hub id that was downloaded before.

    Its name is the directory's last part, or the id. Nothing is downloaded. Raises `InvalidInput` where there
    is no such model here, or one that cannot be read.
    """
    directory = _existing(path_or_id)
    name = directory.resolve().name if Path(path_or_id).expanduser().is_dir() else path_or_id
    return BaseModel(name, fingerprint(base_config(path_or_id), directory))


def base_config(path_or_id: str) -> dict[str, Any]:
    """The content of the model's `config.json`; finds models, and fails, as `base_model_at` does."""
    return _json_object(_existing(path_or_id) / "config.json")


def base_directory(path_or_id: str) -> Path | None:
    """Where the model's files are on this machine, if they are."""
    if not path_or_id:
        return None
    local = Path(path_or_id).expanduser()
    if (local / "config.json").is_file():
        return local
    cached = None if local.exists() else _cached_config(path_or_id)
    return cached.parent if cached is not None else None


def _existing(path_or_id: str) -> Path:
    directory = base_directory(path_or_id)
    if directory is None and path_or_id and Path(path_or_id).expanduser().exists():
        raise InvalidInput(f"{path_or_id} is no model directory: it holds no config.json")
    if directory is None:
        raise InvalidInput(
            f"base model {path_or_id!r} is neither a directory here nor a model in this machine's Hugging Face "
            f"cache; give the path of the directory that holds its config.json"
        )
    return directory


def _cached_config(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # here, since most callers name a directory

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except ValueError:  # not even the form of a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _weight_files(directory: Path) -> list[Path]:
    """The files that hold the model's weights, by the order in which transformers looks for them."""
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    if (directory / _INDEX).is_file():
        shards = _json_object(directory / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise InvalidInput(f"{directory / _INDEX} has no weight_map; download or save the model again")
        return [directory / Path(shard).name for shard in sorted({str(shard) for shard in shards.values()})]
    return sorted(directory.glob("*.safetensors"))


def _samples(file: Path) -> Iterator[tuple[str, list[object]]]:
    """Yield each tensor's name with its dtype, its shape and the digest of its first bytes."""
    try:
        with file.open("rb") as stream:
            header, start = _header(stream, file.stat().st_size)
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                stream.seek(start + begin)
                sample = stream.read(min(_SAMPLE_BYTES, end - begin))
                if len(sample) < min(_SAMPLE_BYTES, end - begin):
                    raise ValueError(f"the file ends inside {name}")
                yield name, [entry["dtype"], entry["shape"], digest_of(sample)]
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise InvalidInput(
            f"{file} is not a complete safetensors file ({error}); download or save the model again"
        ) from error


def _header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data starts."""
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > min(_MAX_HEADER_BYTES, size):
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("a header that is no JSON object")
    return header, 8 + length


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} cannot be read ({error}); download or save the model again") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} holds no JSON object; download or save the model again")
    return content


def _short_digest(content: object) -> str:
    return digest_of(json.dumps(content, sort_keys=True).encode()).removeprefix("blake3:")[:16]
