"""A hop's requests to its driver: to the network's side, to the trainer's, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.peer.pipeline.messages import (
    Microbatch,
    Note,
    Omission,
    PassAnswer,
    PassHeader,
    PassKey,
    Payload,
)

JobKind = Literal["begin", "forward", "loss", "backward", "evaluate"]
"""A computation of the trainer's thread:

begin     draw a microbatch and compute the first stage's output; ends with `Hop.began`
forward   compute the output; ends with `Hop.forwarded`
loss      at the last stage: the loss, the input's gradient (`Hop.gradient_ready`), then the
          weights' gradients; ends with `Hop.finished`
backward  recompute, the input's gradient (`Hop.gradient_ready`; not at the first stage), then the
          weights' gradients; ends with `Hop.finished`
evaluate  at the last stage: the loss alone; ends with `Hop.evaluated`

Each ends with `Hop.job_failed` if it raises.
"""

SendFailure = Literal["unreachable", "lost", "timed-out", "own"]
"""Why a send failed:

unreachable  no connection was made
lost         the connection broke, or the peer answered with something that is no answer
timed-out    the peer was silent
own          an error of this process
"""


@dataclass(frozen=True, kw_only=True)
class SendPass:
    """Send a header; after "accepted" also the payload.

    Report `Hop.answered` once, if there is an answer, and then `Hop.delivered` or
    `Hop.send_failed` once, for "accepted"; without an answer only `Hop.send_failed`.
    """

    number: int
    """Which send of this hop it is."""
    peer: str
    header: PassHeader
    payload: Payload
    asks: bool = False
    """True if the peer had the payload before: probably only the header travels, and it need not
    wait for other sends."""

    @property
    def key(self) -> PassKey:
        """Return the key of the pass."""
        return self.header.key


@dataclass(frozen=True, kw_only=True)
class AnswerPass:
    """Answer a header.

    After "accepted" read the payload (`messages.read_payload`) and report `Hop.received`, or
    `Hop.not_received` if it does not come or does not fit.
    """

    peer: str
    header: PassHeader
    answer: PassAnswer


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Call a peer with a note; report `Hop.told`, or `Hop.untold` if it was not reached."""

    peer: str
    note: Note


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """Compute, after all jobs and steps that were asked for before."""

    kind: JobKind
    key: PassKey
    sequences: int = 0
    """Of the microbatch; 0 in "begin"."""
    rows: int = 0
    tokens: bytes = b""
    frame: bytes = b""
    """The input, as it was received; empty at the first stage, which has the tokens."""
    gradient: bytes = b""
    """Of the output, in "backward"."""
    loss: float | None = None
    """Of the microbatch, in "backward": nats a token."""
    sender: str = ""
    """Of the frame, or of the gradient in "backward"; empty in "begin"."""
    holds: bool = False
    """Keep the weights' gradients apart until `SettleHeld`."""


@dataclass(frozen=True, kw_only=True)
class TakeStep:
    """Take an inner step with the gradients that were added up; report `Hop.stepped`."""

    microbatches: int


@dataclass(frozen=True, kw_only=True)
class SettleHeld:
    """Add the gradients that a job held, or drop them."""

    key: PassKey
    counts: bool


@dataclass(frozen=True, kw_only=True)
class MicrobatchEnded:
    """At the origin: a microbatch that it began has ended."""

    microbatch: Microbatch
    trains: bool
    rows: int
    loss: float | None
    """Nats a token; None if it was omitted."""
    omission: Omission | None


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Nothing is in work any more, and nothing new is taken."""

    microbatches: int
    """Counted since the last step; `Hop.flush` takes a step with them."""


@dataclass(frozen=True, kw_only=True)
class Complain:
    """Tell this peer's owner, once of each peer, that another one sends what cannot be used."""

    peer: str
    text: str
    origin: str = ""
    """Of the microbatch; empty if the peer has announced something that is none."""


Action = (
    SendPass
    | AnswerPass
    | Tell
    | RunJob
    | TakeStep
    | SettleHeld
    | MicrobatchEnded
    | Drained
    | Complain
)
