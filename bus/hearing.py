"""What a peer concludes from what it hears of a controller run: gaps, silence, another run. Pure.

Published events are a hint that may get lost (ZeroMQ guide, chapter 5, the Clone pattern): each names the
sequence before it, every heartbeat the newest, and a gap is filled by asking for the present.
"""

from __future__ import annotations

from typing import NamedTuple

from bus.errors import JoinFailed
from bus.events import ControllerAlive, Envelope, Event, JoinAccepted, JoinRefused, Peer, PeerUnknown, Reason


class Heard(NamedTuple):
    """What to do about one frame: `event` goes to the peer's mind, `missed` asks for the present, `lost` joins anew."""

    event: Event | None = None
    missed: bool = False
    lost: bool = False


class Hearing:
    """One peer's ear for one controller run, from the welcome on; `now` is in seconds."""

    def __init__(self, peer: Peer, run: str, lease: float, now: float) -> None:
        self.run = run
        self.sequence: int | None = None
        """The newest sequence heard of; None until something published was heard."""
        self.gaps = 0
        """How often published events were missed, and asked for."""
        self._peer = peer
        self._lease = lease
        self._heard_at = now

    def published(self, envelope: Envelope, now: float) -> Heard:
        """A frame that the controller said to all."""
        if envelope.run != self.run:
            return Heard(lost=True)
        self._heard_at = now
        if isinstance(envelope.event, ControllerAlive):
            return Heard(missed=self._missed(envelope.event.sequence, envelope.event.sequence))
        return Heard(envelope.event, self._missed(envelope.previous, envelope.sequence))

    def sent(self, envelope: Envelope, now: float) -> Heard:
        """A frame that was sent to this peer alone; raises `JoinFailed` if it turns the peer out."""
        if envelope.event == PeerUnknown(self._peer):
            return Heard(lost=True)  # whatever run says so: one that was started anew knows nobody
        if envelope.run != self.run:
            return Heard()
        self._heard_at = now
        match envelope.event:
            case JoinRefused(reason=Reason.NAME_TAKEN, detail=detail):
                raise JoinFailed(self._peer.node, Reason.NAME_TAKEN, detail)
            case JoinRefused() | JoinAccepted() | PeerUnknown():  # late answers to a peer that has joined
                return Heard()
            case event:
                return Heard(event)

    def silence(self, now: float) -> float:
        """For how long nothing was heard; from a lease on, the controller is gone: nothing else tells."""
        return now - self._heard_at

    def is_lost(self, now: float) -> bool:
        return self.silence(now) >= self._lease

    def _missed(self, expected: int, newest: int) -> bool:
        """Keep the newest sequence, and say whether something before it was missed."""
        missed = self.sequence != expected
        self.gaps += missed and self.sequence is not None
        self.sequence = newest
        return missed
