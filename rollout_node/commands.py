"""What a node's agent asks of its workers and what they answer, over the node's own socket.

One envelope carries one command; its sequence is the command's number, and the answer comes back under the
same one. Every worker answers every command exactly once. These never leave the machine and never reach the
journal, so they are no events of the bus.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, get_args

from bus.codec import Codec
from bus.events import Attempt
from bus.manifest import AdapterManifest

# ----------------------------------------------------------------------------------------------- asked


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Enter the view's group; worker `n` takes `ranks[n]`. Timeout in seconds."""

    view: int
    ranks: tuple[int, ...]
    size: int
    store: str
    timeout: float


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Drop the view's group, if there is one."""

    view: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check the layout (its canonical bytes) against the model, and allocate the staging buffer."""

    attempt: Attempt
    layout: bytes
    manifest: AdapterManifest


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the bytes from the collective together with the other ranks of the audience. Timeout in seconds."""

    attempt: Attempt
    audience: tuple[int, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Build:
    """Make vLLM's adapter out of the staged bytes, under the engine's number for it."""

    attempt: Attempt
    lora_id: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the filled slot with what was built, bit for bit, and free the staging buffer."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget an attempt: stop its transfer, free its buffer."""

    attempt: Attempt


Command = JoinGroup | LeaveGroup | Prepare | Receive | Build | Verify | Discard

# -------------------------------------------------------------------------------------------- answered


class Failure(StrEnum):
    """Which family of error stopped a worker; the agent raises it again as itself."""

    RENDEZVOUS = "rendezvous"
    TRANSFER = "transfer"
    REFUSED = "refused"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Attached:
    """A worker's first words: it listens."""

    worker: int


@dataclass(frozen=True, slots=True)
class Done:
    worker: int


@dataclass(frozen=True, slots=True)
class BytesHeld:
    """The bytes arrived and have this digest."""

    worker: int
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The command was not done; `missing` holds the ranks that never came to a rendezvous."""

    worker: int
    family: Failure
    reason: str
    detail: str
    missing: tuple[int, ...] = ()


Answer = Attached | Done | BytesHeld | Failed

COMMAND_CODEC: Final = Codec({kind.__name__: kind for kind in get_args(Command)})
ANSWER_CODEC: Final = Codec({kind.__name__: kind for kind in get_args(Answer)})
