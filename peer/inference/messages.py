"""Messages between a client that generates text and the peers that serve the stages.

Each is a call `text` of the stage's module (`text@stage-2`). Question and answer have one form::

    length    u16 big-endian, of the record
    record    canonical msgpack (`atoll.optim.log.entry`), an `Extend` or an `Extended`
    payload   the rest; its length follows from record and stage alone

An `Extend` carries new positions of one text to one stage: int32 token ids at the first stage, else
float32 rows `x_D`, all little-endian. "done" carries back float32 rows, as many as were sent; of
the last stage the logits of the newest position. Numbers travel exactly, whatever codec the run's
microbatches have, or the text would not be that of the checkpoint.

A session is named by its client's PeerID and by 16 random bytes. It reads the parameters of one
position of the stage's log, which its first question names or leaves open. Rows are counted from
the beginning of the text:

    start = rows held    the session grows
    the last question    the same answer again, if digest and rows are the same
    start = 0            the session begins again, at its position of the log
    any other            "gap", with the rows that it holds; 0 if there is no such session

Answers::

    done      position: of the log, that the session reads; held: rows
    gap       held: rows from which to send again
    busy      retry_ms: when to try again; nobody is blamed
    moved     position: where the log stands; the one that was asked for is not here any more
    refused   reason: see `RefusedText`

A reader MUST compare the length of a payload with what its record allows before it uses it, and
MUST refuse ids outside the vocabulary and numbers that are not finite.

Errors::

    MalformedRecord    bytes that are no such message, or a payload of another length
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from atoll.optim.log.entry import Count, MalformedRecord, Record
from atoll.peer.pipeline.messages import MAX_RETRY_MS

TEXT = "text"
TEXT_PROTOCOL = 1  # clients and servers of another one refuse each other
SESSION_BYTES = 16
PIECE_BYTES = 1 << 20  # of rows in one question: a third of what a call takes
NUMBER_BYTES, ID_BYTES = 4, 4
LENGTH_BYTES = 2  # of a record's length
MAX_ROWS = 1 << 24  # of any text; the run's own limit is far below

RefusedText = Literal["protocol", "shape", "size", "payload", "failed"]
"""Why a server refuses for good:

protocol  it speaks another version
shape     more positions than the run's model has, or than a question or the session may
size      the session would take more memory than one client may
payload   an id outside the vocabulary, or a number that is not finite
failed    the computation failed, by no fault of the question
"""

Rows = Annotated[int, Field(gt=0, le=MAX_ROWS)]


class Extend(Record):
    """New positions of a text."""

    max_bytes: ClassVar[int] = 256

    protocol: Count
    session: Annotated[bytes, Field(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    position: Count | None
    """of the log, to be read; None: where the server stands, or what the session reads"""
    start: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    rows: Rows
    max_rows: Rows
    """that the text may get; a session reserves memory for as many"""


class Extended(Record):
    """The answer."""

    max_bytes: ClassVar[int] = 256

    verdict: Literal["done", "gap", "busy", "moved", "refused"]
    position: Count = 0
    held: Annotated[int, Field(ge=0, le=MAX_ROWS)] = 0
    retry_ms: Annotated[int, Field(ge=0, le=MAX_RETRY_MS)] = 0
    reason: RefusedText | None = None


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """The shapes of a stage's input and output."""

    is_first: bool
    is_last: bool
    width: int
    """Numbers of a row between stages."""
    vocab_size: int
    """Ids are below it."""
    num_logits: int
    """Numbers of the last stage's answer."""
    max_rows: int
    """Most positions of a text."""

    @property
    def piece_rows(self) -> int:
        """Return the most rows of one question; equal at all stages."""
        return max(1, PIECE_BYTES // (NUMBER_BYTES * self.width))

    def input_bytes(self, rows: int) -> int:
        """Return the exact length of a question's payload."""
        return rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Return the length of one row of a question."""
        return ID_BYTES if self.is_first else NUMBER_BYTES * self.width

    def output_bytes(self, rows: int) -> int:
        """Return the exact length of an answer's payload."""
        return NUMBER_BYTES * (self.num_logits if self.is_last else rows * self.width)


M = TypeVar("M", bound=Record)


def pack(record: Record, payload: bytes | memoryview = b"") -> bytes:
    """Return a message as it travels."""
    head = record.encode()
    return b"".join((len(head).to_bytes(LENGTH_BYTES), head, payload))


def unpack(kind: type[M], message: bytes) -> tuple[M, memoryview]:
    """Return record and payload of a message.

    Raises:
        MalformedRecord: it is no such message.
    """
    view = memoryview(message)
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES])
    if len(view) < end:
        raise MalformedRecord(f"expected a record of {end} bytes, got {len(view)}")
    return kind.decode(bytes(view[LENGTH_BYTES:end])), view[end:]


def refusal_of(question: Extend, shape: TextShape) -> RefusedText | None:
    """Compare a question with the run; return why it is refused, None if it is not."""
    if question.protocol != TEXT_PROTOCOL:
        return "protocol"
    stop = question.start + question.rows
    if question.rows > shape.piece_rows or not stop <= question.max_rows <= shape.max_rows:
        return "shape"
    return None


def expect_length(payload: memoryview, expected: int) -> None:
    """Raise MalformedRecord if a payload has another length."""
    if len(payload) != expected:
        raise MalformedRecord(f"expected a payload of {expected} bytes, got {len(payload)}")
