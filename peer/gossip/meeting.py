"""One side of a meeting: vectors in both directions on one stream, then a commit.

    inviter    terms ->                      <- terms             invited
               cells, sent ->                <- cells, sent
               (holds everything)            <- prepared          (holds everything)
               commits, commit ->                                 commits
                                             <- end

The inviter decides. It commits only after both sides hold and have checked everything; a meeting
that it has not committed has no effect. A prepared invited peer that loses the inviter is in doubt
and asks for the outcome (`atoll.peer.gossip.invitations`). No state changes before the commit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from atoll.compression import CodecError
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside, together
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.inprocess.gossip import Met, Side, handed_over, meet
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import LENGTH, Cells, UpdateError, body_of
from atoll.optim.reduction.contribution import WorkRefused, work_weight
from atoll.optim.state import vectors as memory
from atoll.optim.state.outer_state import OuterState, is_finite
from atoll.optim.state.pieces import encode_pieces
from atoll.peer.gossip.context import GossipContext
from atoll.peer.gossip.messages import (
    AHEAD,
    ALIVE,
    CELL,
    COMMIT,
    PREPARED,
    PROTOCOL,
    SENT,
    TERMS,
    Ahead,
    Terms,
    VectorsSent,
    tagged,
)
from atoll.peer.rounds.messages import PACED_BYTES
from atoll.peer.rounds.policies import exchange_mbit_s, round_deadline_s


class InDoubt(Exception):
    """The other side may have committed and cannot be reached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GossipWindow:
    """Result of one window, on offer to a partner."""

    number: int
    delta_N: Tensor  # noqa: N815
    weight: float
    tokens: int
    steps: int
    loss: float | None
    inner_lr: float


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnSide:
    """One side's window, state and mass, fixed during a meeting."""

    window: GossipWindow
    state: OuterState
    mass: float


@dataclass(kw_only=True)
class MeetingTimes:
    """Times of a meeting, in seconds on the context's clock; None until the event."""

    accepted: float | None = None
    sent: float | None = None
    received: float | None = None
    encode_s: float = 0.0
    met_s: float = 0.0
    """Seconds of the step."""


class OutgoingVectors:
    """Encodes this side's vectors as they are sent, and holds what the other side decodes."""

    def __init__(self, cells: Cells, vectors: Sequence[Tensor]) -> None:
        """Send whole vectors of these chunks, one after the other."""
        self._cells, self._vectors = cells, vectors
        self._vector, self._cell = 0, 0  # the next to be encoded
        self.decoded = [memory.empty(cells.numel) for _ in vectors]
        self.wire_bytes = 0
        self._hash = hashlib.sha256()

    def encode(self) -> bytes:
        """Return the next frames, each with its length; nothing after the last.

        Raises:
            CodecError: the vectors hold NaN or infinity.
        """
        if self._vector == len(self._vectors):
            return b""
        cells = self._cells
        run, codec = next(cells.runs(self._cell, len(cells)))
        values = self._vectors[self._vector][cells.values(run.start, run.stop)]
        frames = encode_pieces(codec, values, cells.fragment.pieces[run.start : run.stop])
        for index, frame in zip(run, frames, strict=True):
            place = cells.values(index, index + 1)
            self.decoded[self._vector][place] = cells.decode_sent(index, frame)
        at_end = run.stop == len(cells)
        self._vector, self._cell = (self._vector + 1, 0) if at_end else (self._vector, run.stop)
        data = body_of(frames)
        self._hash.update(data)
        self.wire_bytes += len(data)
        return data

    def finish(self) -> VectorsSent:
        """Return what tells the other side that this was all."""
        return VectorsSent(wire_bytes=self.wire_bytes, digest=self._hash.digest())


class IncomingVectors:
    """Checks and decodes the other side's vectors as they arrive."""

    def __init__(self, cells: Cells, vectors: int) -> None:
        """Expect `vectors` whole vectors of these chunks, one after the other."""
        self._cells = cells
        self._limits = [cells.max_sent_bytes(i) for i in range(len(cells))]
        self._values = [memory.empty(cells.numel) for _ in range(vectors)]
        self._due = vectors * len(cells)
        self._count = 0
        self._wire_bytes = 0
        self._hash = hashlib.sha256()
        self._rest = bytearray()
        """Bytes of an incomplete frame."""

    def take(self, data: memoryview) -> None:
        """Decode a piece of the stream; frames may begin and end anywhere in it.

        Raises:
            UpdateError: there are too many frames, or one is too long.
            CodecError: a frame is invalid, or holds NaN or infinity.
        """
        self._hash.update(data)
        self._wire_bytes += len(data)
        self._rest += data
        at = 0
        while (end := self._end_of_frame(at)) is not None:
            self._decode(bytes(self._rest[at + LENGTH.size : end]))
            at = end
        del self._rest[:at]

    def _end_of_frame(self, at: int) -> int | None:
        # None if the frame that starts here is not complete.
        if at + LENGTH.size > len(self._rest):
            return None
        if self._count == self._due:
            raise UpdateError(f"expected at most {self._due} chunks, got more")
        (length,) = LENGTH.unpack_from(self._rest, at)
        limit = self._limits[self._count % len(self._cells)]
        if length > limit:
            raise UpdateError(f"expected a chunk of at most {limit} bytes, got {length}")
        end = at + LENGTH.size + length
        return end if end <= len(self._rest) else None

    def _decode(self, frame: bytes) -> None:
        vector, index = divmod(self._count, len(self._cells))
        values = self._cells.decode_sent(index, frame)
        if not is_finite(values):
            raise CodecError(f"chunk {index}: expected finite numbers, got NaN or infinity")
        self._values[vector][self._cells.values(index, index + 1)] = values
        self._count += 1

    def finish(self, sent: VectorsSent) -> Sequence[Tensor]:
        """Return the vectors.

        Raises:
            MalformedRecord: chunks are missing, or the digest does not match.
        """
        whole = self._count == self._due and not self._rest
        if not whole or (self._wire_bytes, self._hash.digest()) != (sent.wire_bytes, sent.digest):
            raise MalformedRecord(
                f"expected {self._due} chunks with the announced digest, got {self._count} chunks "
                "or another digest"
            )
        return self._values


class PartnerAhead(Refused):
    """The invited peer refuses because it is in a later round.

    Attributes:
        round: the round that it names.
    """

    def __init__(self, round_: int) -> None:
        super().__init__(RefusalCode.AHEAD, f"the peer is in round {round_}")
        self.round = round_


class Meeting:
    """One side of a meeting on an open stream."""

    def __init__(self, ctx: GossipContext, stream: Stream, mine: OwnSide, exchange: bytes) -> None:
        """Use an open stream for the meeting with the id `exchange`."""
        self._ctx = ctx
        self._stream = stream
        self._mine = mine
        self._exchange = exchange
        self._stall_s = ctx.settings.stall_s
        self._lock = asyncio.Lock()
        self._theirs: Terms | None = None
        self._bytes = 3 * ctx.cells.max_body_bytes(1)
        """Of the most vectors that travel, at most."""
        self.times = MeetingTimes()

    # terms

    async def send_terms(self, *, patience_s: float = 0.0) -> None:
        """Send this side's terms, with the seconds that it waits for the other side."""
        window = self._mine.window
        terms = Terms(
            protocol=PROTOCOL,
            round=self._mine.state.position,
            exchange=self._exchange,
            incarnation=self._ctx.me.incarnation,
            mass=self._mine.mass,
            weight=window.weight,
            tokens=window.tokens,
            steps=window.steps,
            uplink_mbit_s=self._ctx.link.uplink_mbit_s,
            patience_s=patience_s,
        )
        await self._say(tagged(TERMS, terms))

    async def receive_terms(self) -> None:
        """Wait for the other side's terms; keepalives may precede them.

        Raises:
            PartnerAhead: the other side is in a later round.
            Refused: it declines.
            MalformedRecord: its terms name another round or meeting.
        """
        message = await self._next()
        if message[:1] == AHEAD:
            raise PartnerAhead(Ahead.decode(message[1:]).round)
        if message[:1] != TERMS:
            raise MalformedRecord("expected terms, got another message")
        self.take_terms(Terms.decode(message[1:]))

    def take_terms(self, terms: Terms) -> None:
        """Accept the other side's terms.

        Raises:
            MalformedRecord: they name another round or meeting.
            WorkRefused: the weight does not follow from its work.
        """
        expected = (self._mine.state.position, self._exchange)
        if (terms.round, terms.exchange) != expected:
            raise MalformedRecord(f"expected terms of round {expected[0]}, got {terms.round}")
        check_weight(self._ctx, terms)
        self._theirs = terms
        self.times.accepted = self._ctx.now()

    # vectors

    async def trade(self) -> Met:
        """Send and receive all vectors, and compute this side's result of the meeting.

        Raises:
            TransportError, TimeoutError: the other side is gone or too slow.
            MalformedRecord, UpdateError, CodecError: it sends invalid data.
        """
        async with asyncio.timeout(self._deadline_s()):
            async with beside(self._stay_alive()):
                mine, theirs = await together(self._send(), self._receive())
                return await self._meet(mine, theirs)

    async def _meet(self, mine: Side, theirs: Side) -> Met:
        before = self._ctx.now()
        met: Met = await self._ctx.compute(
            lambda: meet(
                self._ctx.method,
                self._ctx.fragment,
                self._mine.state,
                mine,
                theirs,
                inner_lr=self._mine.window.inner_lr,
            )
        )
        self.times.met_s = self._ctx.now() - before
        return met

    def _deadline_s(self) -> float:
        rate = exchange_mbit_s(self._ctx.link.uplink_mbit_s, self._terms.uplink_mbit_s)
        return round_deadline_s(self._bytes, rate, self._stall_s)

    @property
    def _terms(self) -> Terms:
        if self._theirs is None:
            raise RuntimeError("the other side's terms have not been accepted")
        return self._theirs

    async def _send(self) -> Side:
        mine, state = self._mine, self._mine.state
        vectors = [mine.window.delta_N, state.params_N]
        # Its momentum travels with mass, because w (x + mu / (1 - mu) m) is conserved; without it,
        # the giver's momentum would double.
        if handed_over(mine.mass, self._terms.mass) > 0:
            vectors.append(state.momentum_N)
        outgoing = OutgoingVectors(self._ctx.cells, vectors)
        while data := await self._encoded(outgoing):
            await self._send_paced(data, outgoing.wire_bytes - len(data))
        await self._say(tagged(SENT, outgoing.finish()))
        self.times.sent = self._ctx.now()
        delta_N, params_N, *momentum = outgoing.decoded
        return Side(
            delta_N=delta_N,
            params_N=params_N,
            momentum_N=momentum[0] if momentum else None,
            mass=mine.mass,
            weight=mine.window.weight,
            steps=mine.window.steps,
        )

    async def _encoded(self, outgoing: OutgoingVectors) -> bytes:
        before = self._ctx.now()
        data: bytes = await self._ctx.compute(outgoing.encode)
        self.times.encode_s += self._ctx.now() - before
        return data

    async def _send_paced(self, data: bytes, number: int) -> None:
        for start in range(0, len(data), PACED_BYTES):
            message = data[start : start + PACED_BYTES]
            order = (self._mine.state.position, number + start)
            turn = self._ctx.link.pacer.turn(len(message), order)
            try:
                await turn
            finally:
                turn.cancel()  # a future, not a task: gives its place in the pacer back
            await self._say(CELL + message, timeout_s=self._deadline_s())

    async def _receive(self) -> Side:
        terms = self._terms
        gives = handed_over(terms.mass, self._mine.mass) > 0
        incoming = IncomingVectors(self._ctx.cells, 3 if gives else 2)
        while True:
            message = await self._next()
            kind, data = message[:1], memoryview(message)[1:]
            if kind == CELL:
                await self._ctx.compute(incoming.take, data)
            elif kind == SENT:
                break
            else:
                raise MalformedRecord("expected chunks, got another message")
        delta_N, params_N, *momentum = incoming.finish(VectorsSent.decode(bytes(data)))
        self.times.received = self._ctx.now()
        return Side(
            delta_N=delta_N,
            params_N=params_N,
            momentum_N=momentum[0] if momentum else None,
            mass=terms.mass,
            weight=terms.weight,
            steps=terms.steps,
        )

    # the commit

    async def decide(self, commit: Callable[[], None]) -> None:
        """Commit as the inviter once the other side is prepared, and notify it.

        Raises:
            TransportError, TimeoutError, MalformedRecord: the other side is not prepared; nothing
                is committed.
        """
        async with asyncio.timeout(self._deadline_s()):
            if await self._next() != PREPARED:
                raise MalformedRecord("expected PREPARED, got another message")
        commit()
        with suppress(TransportError, TimeoutError):
            await self._say(COMMIT)
            await self._stream.recv(timeout_s=self._stall_s)

    async def follow(self) -> None:
        """Report as the invited side that it is prepared, and wait for the inviter's commit.

        Raises:
            InDoubt: the inviter may or may not have committed.
        """
        try:
            await self._say(PREPARED)
            message = await self._next()
        except (TransportError, TimeoutError) as error:
            raise InDoubt(str(error)) from error
        if message != COMMIT:
            raise InDoubt("expected a commit, got another message")

    # messages

    async def _say(self, message: bytes, *, timeout_s: float | None = None) -> None:
        async with self._lock:
            await self._stream.send(message, timeout_s=timeout_s or self._stall_s)

    async def _next(self) -> bytes:
        while True:
            message = await self._stream.recv(timeout_s=self._stall_s)
            if message is None:
                raise PeerUnreachable("the stream ended in the middle of an exchange")
            if message != ALIVE:
                return message

    async def _stay_alive(self) -> None:
        with suppress(TransportError):
            while True:
                await asyncio.sleep(self._ctx.alive_s)
                await self._say(ALIVE)


def check_weight(ctx: GossipContext, terms: Terms) -> None:
    """Check that a weight is 0 or follows from tokens and steps.

    Raises:
        WorkRefused: it does not, or the tokens or steps are out of range.
    """
    due = work_weight(terms.tokens, terms.steps, ctx.method.weights)
    if terms.weight not in (0.0, due):
        raise WorkRefused(f"expected a weight of {due} or 0, got {terms.weight}")


BROKEN = (TransportError, TimeoutError, MalformedRecord, UpdateError, CodecError, WorkRefused)
"""Errors that end a meeting before it is agreed."""
