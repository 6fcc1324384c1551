"""A pass at one peer, from its arrival to its end, and the rules of the run that bound it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from atoll.peer.pipeline.actions import Action, SendPass, Tell
from atoll.peer.pipeline.ledger import Returned
from atoll.peer.pipeline.messages import (
    MAX_STAGES,
    MAX_WAIT_MS,
    NOTHING,
    PIPELINE_PROTOCOL,
    RETURN_OF,
    FrameShape,
    Omission,
    OmitNote,
    PassHeader,
    PassKey,
    Payload,
    RecountNote,
)
from atoll.peer.pipeline.wiring import Reservation

MAX_REQUESTERS = 4  # of one pass: the hop before was replaced three times


@dataclass(frozen=True, kw_only=True)
class HopRules:
    """The rules on which all hops of a run agree, or that one peer has for itself."""

    stages: int
    shape: FrameShape
    lifetime_s: float
    """Of a microbatch, from the draw at its origin to its end there."""
    step_microbatches: int
    """Microbatches of an inner step of one peer."""
    staleness: int = 0
    """Inner steps that a peer may take between a microbatch's forward and its gradient."""
    exact: bool = False
    """Gradients are held until the origin says which peers' count."""
    max_in_flight: int = 32
    """Microbatches in work at one peer. With 16 the links between three stages were idle for 15 to
    18% of the time at 25 Mbit/s, with 32 for 5 to 10% (in virtual time, by turns at each link).
    With 48 they wait longer on slow links (docs/benchmarks/pipeline.md)."""
    max_bytes: int = 1 << 30
    """Of frames and tokens that one peer keeps; one origin or sender gets half."""
    max_passes: int = 1 << 16
    """Names that a peer remembers, some 1 KB each; one origin or sender gets half."""
    compute_ahead: int = 2
    """Jobs that the trainer's thread has: one runs, one waits, so that it never waits for the
    loop."""

    def __post_init__(self) -> None:
        """Refuse rules that no hop can follow."""
        if not 2 <= self.stages <= MAX_STAGES:
            raise ValueError(f"expected 2 to {MAX_STAGES} stages, got {self.stages}")
        if not 0 < self.lifetime_s * 1000 <= MAX_WAIT_MS:
            raise ValueError(
                f"expected lifetime_s up to {MAX_WAIT_MS // 1000}, got {self.lifetime_s}"
            )
        if self.max_in_flight < 1 or self.compute_ahead < 1:
            raise ValueError("expected max_in_flight and compute_ahead of at least 1")


class Phase(Enum):
    """The progress of a pass at this peer."""

    ARRIVING = auto()  # accepted; its payload is on the way
    QUEUED = auto()  # for the trainer, or computed by it, on the way out
    ROUTING = auto()  # its output waits for a peer that takes it
    AWAITED = auto()  # its output is at a peer of the next stage
    RETURNED = auto()  # the gradient of its output is here
    HELD = auto()  # all is computed; the origin has not settled it yet (`exact`)
    DONE = auto()
    OMITTED = auto()

    @property
    def is_open(self) -> bool:
        """Return whether something is still to be done for the pass."""
        return self not in (Phase.DONE, Phase.OMITTED)

    @property
    def waits_for_return(self) -> bool:
        """Return whether the gradient of the output would be used."""
        return self in (Phase.ROUTING, Phase.AWAITED)


@dataclass(kw_only=True, slots=True, eq=False)
class Pass:
    """One microbatch at one peer."""

    key: PassKey
    deadline_s: float
    phase: Phase
    due_s: float
    """when the phase takes too long"""
    sequences: int = 0
    rows: int = 0
    requesters: list[str] = field(default_factory=list)
    """peers of the stage before that sent it, the newest last; none at the first stage"""
    received: Payload = NOTHING
    output: Payload = NOTHING
    gradient: bytes = b""
    send: SendPass | None = None
    """the hand-over of the output that counts now"""
    reservation: Reservation | None = None
    """of that hand-over, until it is settled"""
    is_there: bool = False
    """whether that peer has the output, as far as is known"""
    replace_at_s: float = inf
    """when another peer gets the output, whatever that one answers"""
    asked_at_s: dict[str, float] = field(default_factory=dict)
    """peers of the next stage that took the output: each may return it"""
    excluded: set[str] = field(default_factory=set)
    """peers of the next stage that refused it or gave it up"""
    arriving_from: str = ""
    """the peer whose return is being received"""
    arriving_until_s: float = inf
    """when that takes too long"""
    returned_by: str = ""
    path: tuple[str, ...] = ()
    """of the return"""
    loss: float | None = None
    is_settled: bool = False

    def may_return(self, peer: str) -> bool:
        """Return whether a peer of the next stage was given the output.

        Its return may overtake its answer, which comes on another stream.
        """
        return peer in self.asked_at_s or (self.send is not None and self.send.peer == peer)

    def add_requester(self, peer: str) -> None:
        """Note that a peer of the stage before waits for the return, now before all others."""
        if peer in self.requesters:
            self.requesters.remove(peer)
        self.requesters = [*self.requesters, peer][-MAX_REQUESTERS:]

    def free(self) -> None:
        """Drop all bytes."""
        self.received = self.output = NOTHING
        self.gradient = b""
        self.send = self.reservation = None
        self.due_s = inf


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Return the time that is left, as a header has it; 0 if there is none."""
    return max(0, min(int((deadline_s - now_s) * 1000), MAX_WAIT_MS))


def outward_header(one: Pass, rules: HopRules, *, stage: int, now_s: float) -> PassHeader:
    """Return the header under which the output of a pass goes to a stage."""
    return _header(one, rules, stage=stage, now_s=now_s)


def return_header(
    one: Pass, result: Returned, rules: HopRules, *, stage: int, now_s: float
) -> PassHeader:
    """Return the header under which the return of a pass goes to a stage."""
    return _header(one, rules, stage=stage, now_s=now_s, result=result)


def _header(
    one: Pass, rules: HopRules, *, stage: int, now_s: float, result: Returned | None = None
) -> PassHeader:
    name, direction = one.key.microbatch, one.key.direction
    way = direction if result is None else RETURN_OF[direction]
    return PassHeader(
        protocol=PIPELINE_PROTOCOL,
        direction=way,
        stage=stage,
        origin=name.origin,
        incarnation=name.incarnation,
        sequence=name.sequence,
        nonce=name.nonce,
        # A pass is open until its deadline, so also in the last part of a millisecond before it.
        remaining_ms=max(1, remaining_ms(one.deadline_s, now_s)),
        sequences=one.sequences,
        rows=one.rows,
        width=rules.shape.width,
        codec=rules.shape.codec(way),
        digest=(one.output if result is None else result.payload).digest,
        path=() if result is None else result.path,
        loss=None if result is None else result.loss,
    )


def recount(key: PassKey, path: tuple[str, ...], rules: HopRules) -> list[Action]:
    """Tell the origin that these peers counted a microbatch and their return was not needed.

    With `exact` they hold what they computed, and drop it.
    """
    if not key.trains or rules.exact:
        return []
    name = key.microbatch
    note = RecountNote(
        origin=name.origin,
        incarnation=name.incarnation,
        sequence=name.sequence,
        nonce=name.nonce,
        path=path,
    )
    return [Tell(peer=name.origin, note=note)]


def omit_note(key: PassKey, reason: Omission, requester: str) -> Tell:
    """Tell a peer that sent a pass that it is given up."""
    name = key.microbatch
    note = OmitNote(
        origin=name.origin,
        incarnation=name.incarnation,
        sequence=name.sequence,
        nonce=name.nonce,
        direction=key.direction,
        reason=reason,
    )
    return Tell(peer=requester, note=note)
