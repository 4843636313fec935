"""Every error that adapterbus raises, by family.

BusError
├── InvalidInput           what a user handed in cannot be used as it is
│   ├── InvalidLayout      an adapter no LoRA server could load
│   └── InvalidAddress     an address that cannot be bound, connected to or advertised
├── TransportError         a socket said no
│   ├── AddressInUse
│   ├── ControllerUnreachable
│   ├── PeerGone
│   └── ChannelClosed
├── CodecError             a frame that is not one of our events
├── ProtocolError          an event that the life cycle does not allow here
├── JoinFailed             the controller will not have this peer
├── CollectiveError        the data plane
│   ├── RendezvousFailed   a group that did not come together
│   └── TransferFailed     bytes that did not arrive
├── EngineError            the inference engine
│   ├── EngineUnsupported  this engine has another shape than the one we know
│   ├── Refused            a manifest this node cannot serve
│   ├── LoadFailed         a payload that did not become a live adapter
│   └── ServerFailed       an inference server that did not start, or does not answer
├── UpdateFailed           a publish that ended without a commit
└── JournalError           the event journal cannot be opened, read or written

Each error carries its facts as fields and builds its own text: what was wrong, where, what to do.
"""

from __future__ import annotations


class BusError(Exception):
    """The root of every error that adapterbus raises."""


class InvalidInput(BusError):
    """Something a user handed in cannot be used; the text says what to change."""


class InvalidLayout(InvalidInput):
    """The tensors do not make a LoRA adapter; `names` lists the offenders."""

    def __init__(self, problem: str, names: tuple[str, ...] = (), remedy: str = "") -> None:
        self.problem = problem
        self.names = names
        self.remedy = remedy
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        text = f"{problem}: {shown}" if names else problem
        super().__init__(f"{text}. {remedy}" if remedy else text)


class InvalidAddress(InvalidInput):
    """An address that cannot be bound, connected to or advertised."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        self.problem = problem
        super().__init__(f"address {address!r}: {problem}")


class TransportError(BusError):
    """A socket refused an operation."""


class AddressInUse(TransportError):
    """Another process holds the address we were told to bind."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is in use by another process; stop it, or choose another port (port 0 picks a free one)"
        )


class ControllerUnreachable(TransportError):
    """Nobody answered at the controller's address in time."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        super().__init__(
            f"no controller answered at {address} within {timeout:g} s; "
            f"check the address, and that a trainer or `adapterbus controller` runs there"
        )


class PeerGone(TransportError):
    """The peer we send to has no connection, or no longer reads what we send."""

    def __init__(self, peer: str, problem: str = "is not connected") -> None:
        self.peer = peer
        self.problem = problem
        super().__init__(f"peer {peer} {problem}")


class ChannelClosed(TransportError):
    """The socket was closed while somebody still used it."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is closed")


class CodecError(BusError):
    """A frame that is not one of our events; it is dropped and counted."""


class ProtocolError(BusError):
    """An event that the life cycle does not allow in this state."""


class JoinFailed(BusError):
    """The controller will not have this peer, and says why."""

    def __init__(self, node: str, reason: str, detail: str) -> None:
        self.node = node
        self.reason = reason
        self.detail = detail
        super().__init__(f"{node} may not join ({reason}): {detail}")


class CollectiveError(BusError):
    """The data plane failed; the group it happened in is never used again."""


class RendezvousFailed(CollectiveError):
    """A group did not come together in time; `missing` holds the ranks that never showed up."""

    def __init__(self, view: int, missing: tuple[int, ...], timeout: float, cause: str = "") -> None:
        self.view = view
        self.missing = missing
        self.timeout = timeout
        self.cause = cause
        who = f"ranks {', '.join(map(str, missing))} never came" if missing else "every rank came, yet no group formed"
        super().__init__(f"view {view} did not form within {timeout:g} s: {who}{f' ({cause})' if cause else ''}")


class TransferFailed(CollectiveError):
    """A transfer broke off: a peer died, or a chunk missed its deadline."""

    def __init__(self, view: int, problem: str) -> None:
        self.view = view
        self.problem = problem
        super().__init__(f"transfer in view {view} failed: {problem}")


class EngineError(BusError):
    """The inference engine did not do what was asked."""


class EngineUnsupported(EngineError):
    """The engine has changed shape since this release, or runs with a setting we do not support."""

    def __init__(self, engine: str, version: str, missing: str) -> None:
        self.engine = engine
        self.version = version
        self.missing = missing
        super().__init__(f"{engine} {version} cannot follow the bus: {missing}")


class Refused(EngineError):
    """A manifest that a node cannot serve, found before a byte moves."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class LoadFailed(EngineError):
    """A payload arrived but did not become a live adapter."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class ServerFailed(EngineError):
    """An inference server did not start, or does not answer; `log` is the end of its log, if there is one."""

    def __init__(self, node: str, problem: str, log: str = "") -> None:
        self.node = node
        self.problem = problem
        self.log = log
        super().__init__(f"{node}: {problem}" + (f"\nthe end of its log:\n{log}" if log else ""))


class UpdateFailed(BusError):
    """A publish ended without a commit; every node still serves what it served before.

    Fields: adapter, version (0 if none was given), node (empty if none is to blame), phase, reason,
    detail, and seconds, the time the attempt took.
    """

    def __init__(
        self, adapter: str, version: int, *, node: str, phase: str, reason: str, detail: str, seconds: float
    ) -> None:
        self.adapter = adapter
        self.version = version
        self.node = node
        self.phase = phase
        self.reason = reason
        self.detail = detail
        self.seconds = seconds
        what = f"{adapter}@{version}" if version else adapter
        who = f" on {node}" if node else ""
        super().__init__(
            f"{what} was not committed: {phase} failed{who} after {seconds:.2f} s ({reason}): {detail}; "
            f"every node still serves its old version"
        )


class JournalError(BusError):
    """The journal cannot be opened, read or written."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"journal {path}: {problem}")
