"""The rollout side: a stock vLLM server that follows the bus, adapters swapped beside live decoding."""

from typing import Final

WORKER_EXTENSION: Final = "rollout_node.worker.AdapterWorkerExtension"
"""What a server's `--worker-extension-cls` must name."""
