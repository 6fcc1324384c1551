"""Messages between peers of neighbouring stages.

A **pass** is one microbatch in one direction at one hop. Its sender opens a stream `pass` and
writes the `PassHeader`. The receiver writes a `PassAnswer`. Only if that is "accepted", the sender
writes the payload, whose length follows from the header alone::

    tokens    int32, little endian, `sequences` rows of `rows / sequences + 1` ids; only on the
              way to the last stage. Row b holds the inputs and, one to the right, the targets
    frame     the activations or gradients, as their codec encodes them

The digest in the header is the SHA-256 of both. A receiver MUST compare the header with the run's
`FrameShape` before it reserves memory, and MUST check the digest and the range of the ids before it
uses the payload.

Directions::

    forward    activations and tokens, to the next stage      returns as   backward
    evaluate   the same, without gradients                    returns as   evaluated
    backward   the gradient of an output, to its sender; with the loss and the path
    evaluated  the loss alone

Notes are calls without an answer: one byte that names the kind, then the record::

    O  OmitNote      a receiver gives a pass up; its sender may try another peer
    S  SettleNote    the origin counts a microbatch; peers on its path may count it (`exact`)
    R  RecountNote   peers that counted a microbatch whose return was not needed; to the origin

All records are those of `atoll.optim.log.entry`: canonical msgpack, strict and bounded.

Errors::

    MalformedRecord    bytes that are no such record, a header that does not fit the run, or a
                       payload that does not fit its header
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

from atoll.optim.log.entry import Count, Digest, Incarnation, MalformedRecord, PeerId, Record

PIPELINE_PROTOCOL = 1  # peers of another protocol refuse each other's passes
MAX_STAGES = 64  # a path of 63 PeerIDs has 4 KB; a stage of fewer than one layer has no use
MAX_WAIT_MS = 3_600_000  # of a microbatch; the run's own lifetime is far below
MAX_RETRY_MS = 60_000  # of a busy peer's answer; receivers pause for less (`wiring.MAX_PAUSE_S`)
ID_BYTES = 4  # of a token

Outward = Literal["forward", "evaluate"]
"""Towards the last stage."""

Direction = Literal["forward", "evaluate", "backward", "evaluated"]

RETURN_OF: dict[Outward, Direction] = {"forward": "backward", "evaluate": "evaluated"}

RefusedPass = Literal["protocol", "stage", "shape", "origin", "expired", "not-asked"]
"""Why a pass is refused for good:

protocol   the peers speak different versions
stage      the receiver serves another stage
shape      rows, width, codec or length are not those of the run
origin     the first stage sends its own microbatches only
expired    its time is over, or it was given up
not-asked  nobody here waits for this return from this peer
"""

Omission = Literal["late", "failed", "no-peer", "withdrawn"]
"""Why a microbatch is given up:

late       its time is over
failed     a computation or a send failed here, by an error of this peer's own
no-peer    every peer of the next stage has refused it or given it up
withdrawn  this peer leaves its stage
"""

Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Path = Annotated[tuple[PeerId, ...], Field(max_length=MAX_STAGES)]
Nonce = Annotated[bytes, Field(min_length=8, max_length=8)]


class Microbatch(NamedTuple):
    """The name of a microbatch."""

    origin: str
    """PeerID of the first-stage peer that drew it"""
    incarnation: str
    sequence: int
    """counted from 0 in the origin's process"""
    nonce: bytes
    """random: only peers on its way know the name, so that no other can claim its return"""


class PassKey(NamedTuple):
    """A microbatch on its way out; its return has the same key."""

    microbatch: Microbatch
    direction: Outward

    @property
    def trains(self) -> bool:
        """Return whether a gradient comes back."""
        return self.direction == "forward"


class Payload(NamedTuple):
    """The bytes after a header. Whoever computes the frame makes it: hashing takes a while."""

    tokens: bytes
    """empty in a return"""
    frame: bytes
    digest: bytes
    """SHA-256 of both"""

    @classmethod
    def of(cls, tokens: bytes, frame: bytes) -> Payload:
        """Return tokens and frame with their digest."""
        digest = hashlib.sha256(tokens)
        digest.update(frame)
        return cls(tokens, frame, digest.digest())

    @property
    def num_bytes(self) -> int:
        """Return the length of both."""
        return len(self.tokens) + len(self.frame)


NOTHING = Payload.of(b"", b"")


@dataclass(frozen=True, kw_only=True)
class FrameShape:
    """The format of a run's frames. All cuts have the same width and codecs."""

    max_rows: int
    """Tokens of the largest microbatch."""

    max_length: int
    """Tokens of the longest sequence that the model takes."""

    width: int
    """Numbers of a token."""

    vocab_size: int

    forward_codec: str
    """Spec of the codec of activations (`atoll.compression.activations`)."""

    backward_codec: str
    """Spec of the codec of gradients."""

    forward_bytes: Callable[[int, int], int]
    """(rows, width) -> exact length of a frame of activations."""

    backward_bytes: Callable[[int, int], int]
    """(rows, width) -> exact length of a frame of gradients."""

    def held_bytes(self, rows: int, sequences: int) -> int:
        """Return what a peer may keep of a pass: input, output, its gradient and its return."""
        frames = self.forward_bytes(rows, self.width) + self.backward_bytes(rows, self.width)
        return 2 * frames + tokens_bytes(rows, sequences)

    def codec(self, direction: Direction) -> str:
        """Return the spec of the codec of frames in a direction; empty if they have none."""
        if direction == "evaluated":
            return ""
        return self.backward_codec if direction == "backward" else self.forward_codec

    def frame_bytes(self, direction: Direction, rows: int) -> int:
        """Return the exact length of a frame."""
        if direction == "evaluated":
            return 0
        of = self.backward_bytes if direction == "backward" else self.forward_bytes
        return of(rows, self.width)


class PassHeader(Record):
    """The first message of a stream `pass`."""

    max_bytes: ClassVar[int] = 12 << 10  # a path of 64 PeerIDs of 128 characters and the rest

    protocol: Count
    direction: Direction
    stage: Stage
    """of the receiver"""
    origin: PeerId
    incarnation: Incarnation
    sequence: Count
    nonce: Nonce
    remaining_ms: Annotated[int, Field(gt=0, le=MAX_WAIT_MS)]
    """until the microbatch is late; no clocks are compared"""
    sequences: Annotated[int, Field(gt=0, lt=2**31)]
    rows: Annotated[int, Field(gt=0, lt=2**31)]
    width: Annotated[int, Field(gt=0, lt=2**31)]
    codec: Annotated[str, Field(max_length=64)]
    digest: Digest
    """SHA-256 of tokens and frame"""
    path: Path
    """of a return: the peers that counted the microbatch, from the last stage to the sender"""
    loss: FiniteFloat | None
    """of a return: nats a token"""

    @property
    def microbatch(self) -> Microbatch:
        """Return the name of its microbatch."""
        return Microbatch(self.origin, self.incarnation, self.sequence, self.nonce)

    @property
    def is_return(self) -> bool:
        """Return whether it goes towards the first stage."""
        return self.direction in ("backward", "evaluated")

    @property
    def key(self) -> PassKey:
        """Return the key of the pass, on the way out or back."""
        trains = self.direction in ("forward", "backward")
        return PassKey(self.microbatch, "forward" if trains else "evaluate")

    @property
    def has_tokens(self) -> bool:
        """Return whether tokens come before the frame."""
        return not self.is_return


class PassAnswer(Record):
    """The receiver's answer to a header."""

    max_bytes: ClassVar[int] = 256

    verdict: Literal["accepted", "busy", "known", "refused"]
    """known: the pass is in work here, or its return is on the way"""
    retry_ms: Annotated[int, Field(ge=0, le=MAX_RETRY_MS)] = 0
    """of busy"""
    reason: RefusedPass | None = None
    """of refused"""


ACCEPTED = PassAnswer(verdict="accepted")
KNOWN = PassAnswer(verdict="known")


def busy(retry_s: float) -> PassAnswer:
    """Return the answer of a peer that asks to be tried again later."""
    return PassAnswer(verdict="busy", retry_ms=min(int(retry_s * 1000), MAX_RETRY_MS))


def refused(reason: RefusedPass) -> PassAnswer:
    """Return the answer of a peer that will not take a pass."""
    return PassAnswer(verdict="refused", reason=reason)


class _Note(Record):
    max_bytes: ClassVar[int] = 1024

    origin: PeerId
    incarnation: Incarnation
    sequence: Count
    nonce: Nonce

    @property
    def microbatch(self) -> Microbatch:
        """Return the name of its microbatch."""
        return Microbatch(self.origin, self.incarnation, self.sequence, self.nonce)


class OmitNote(_Note):
    """The sender gives up a pass that the receiver sent to it."""

    direction: Outward
    reason: Omission

    @property
    def key(self) -> PassKey:
        """Return the key of the pass."""
        return PassKey(self.microbatch, self.direction)


class SettleNote(_Note):
    """The origin has counted a microbatch."""


class RecountNote(_Note):
    """These peers counted a microbatch, and their return was not needed."""

    max_bytes: ClassVar[int] = 12 << 10

    path: Path
    """from the last stage on"""


Note = OmitNote | SettleNote | RecountNote

_KINDS: dict[bytes, type[OmitNote] | type[SettleNote] | type[RecountNote]] = {
    b"O": OmitNote,
    b"S": SettleNote,
    b"R": RecountNote,
}


def encode_note(note: Note) -> bytes:
    """Return a note as it travels."""
    kind = next(kind for kind, record in _KINDS.items() if isinstance(note, record))
    return kind + note.encode()


def decode_note(data: bytes) -> Note:
    """Return the note in `data`.

    Raises:
        MalformedRecord: it holds none.
    """
    record = _KINDS.get(data[:1])
    if record is None:
        raise MalformedRecord(f"expected a note of kind O, S or R, got {data[:1]!r}")
    return record.decode(data[1:])


def check_header(header: PassHeader, shape: FrameShape) -> None:
    """Compare a header with the run, before any memory is reserved.

    Raises:
        MalformedRecord: it announces another shape or codec, or lacks what its direction needs.
    """
    if header.rows > shape.max_rows:
        raise MalformedRecord(f"expected at most {shape.max_rows} rows, got {header.rows}")
    if header.rows % header.sequences:
        raise MalformedRecord(
            f"expected rows in sequences of one length, got {header.rows} in {header.sequences}"
        )
    if header.rows // header.sequences > shape.max_length:
        raise MalformedRecord(
            f"expected sequences of at most {shape.max_length} tokens, "
            f"got {header.rows // header.sequences}"
        )
    if header.width != shape.width:
        raise MalformedRecord(f"expected a width of {shape.width}, got {header.width}")
    codec = shape.codec(header.direction)
    if header.codec != codec:
        raise MalformedRecord(f"expected the codec {codec!r}, got {header.codec!r}")
    if header.is_return != (header.loss is not None) or header.is_return != bool(header.path):
        raise MalformedRecord(f"{header.direction}: a loss and a path belong to returns alone")


def shape_problem(header: PassHeader, shape: FrameShape) -> str:
    """Return what is wrong with a header that was refused for its shape."""
    try:
        check_header(header, shape)
    except MalformedRecord as error:
        return str(error)
    return "expected a return of its output's rows, over the stages behind this one, got another"


def payload_bytes(header: PassHeader, shape: FrameShape) -> int:
    """Return the exact length of a pass's payload, its header being checked."""
    tokens = tokens_bytes(header.rows, header.sequences) if header.has_tokens else 0
    return tokens + shape.frame_bytes(header.direction, header.rows)


def tokens_bytes(rows: int, sequences: int) -> int:
    """Return the length of the ids of a microbatch."""
    return ID_BYTES * (rows + sequences)


def read_payload(
    header: PassHeader, data: bytes | bytearray | memoryview, shape: FrameShape
) -> Payload:
    """Return the payload that came after a header; a return has no tokens.

    Raises:
        MalformedRecord: its length or digest is another one, or an id is not in the vocabulary.
    """
    expected = payload_bytes(header, shape)
    if len(data) != expected:
        raise MalformedRecord(f"expected a payload of {expected} bytes, got {len(data)}")
    if hashlib.sha256(data).digest() != header.digest:
        raise MalformedRecord("the payload's SHA-256 is not the one in its header")
    length = tokens_bytes(header.rows, header.sequences) if header.has_tokens else 0
    view = memoryview(data)
    tokens, frame = bytes(view[:length]), bytes(view[length:])
    if tokens:
        decode_tokens(tokens, header.sequences, shape.vocab_size)
    return Payload(tokens, frame, header.digest)


def encode_tokens(tokens_BT: NDArray[np.integer]) -> bytes:
    """Return the ids of a microbatch as they travel.

    Args:
        tokens_BT: inputs and targets: `T` is one more than the inputs' length.
    """
    return tokens_BT.astype("<i4", casting="same_kind").tobytes()


def decode_tokens(data: bytes, sequences: int, vocab_size: int) -> NDArray[np.int32]:
    """Return the ids, (sequences, length + 1).

    Raises:
        MalformedRecord: they are no rectangle, or one is not in the vocabulary.
    """
    if len(data) % (ID_BYTES * sequences):
        raise MalformedRecord(f"expected ids of {sequences} sequences, got {len(data)} bytes")
    tokens = np.frombuffer(data, dtype="<i4")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise MalformedRecord(f"expected ids from 0 to {vocab_size - 1}, got {wrong}")
    return tokens.reshape(sequences, -1)
