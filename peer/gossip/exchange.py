"""One meeting, from one of its two sides: vectors in both directions on one stream, then a commit.

    inviter    terms ->                      <- terms             invited
               cells, sent ->                <- cells, sent
               (holds everything)            <- prepared          (holds everything)
               commits, commit ->                                 commits
                                             <- end

Who asked decides, and decides to commit only once both hold and have checked everything; what it
has not committed never was.  An invited peer that is prepared and hears no more is in doubt and
asks (`atoll.peer.gossip.asked`).  Until the commit nobody's state has moved.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.compression import CodecError
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.inprocess.gossip import Met, Side, decoded, handed_over, meet
from atoll.optim.log.entry import MalformedRecord, sha256
from atoll.optim.reduction.cells import LENGTH, Cells, UpdateError, pack
from atoll.optim.reduction.weights import WorkRefused, work_weight
from atoll.optim.state.outer_state import OuterState, is_finite
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
    Sent,
    Terms,
    tagged,
)
from atoll.peer.rounds.messages import PACED_BYTES
from atoll.peer.rounds.policies import round_deadline_s


class InDoubt(Exception):  # noqa: N818
    """The other side may have committed, and cannot be heard."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GossipWindow:
    """What a peer learned in one window, on offer to a partner."""

    number: int
    delta_N: Tensor  # noqa: N815
    weight: float
    tokens: int
    steps: int
    loss: float | None
    inner_lr: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Mine:
    """What one side brings: frozen while it meets."""

    window: GossipWindow
    state: OuterState
    mass: float


@dataclass(kw_only=True)
class Times:
    """When things were done, seconds on the context's clock; None while they are not."""

    accepted: float | None = None
    sent: float | None = None
    received: float | None = None
    encode_s: float = 0.0
    met_s: float = 0.0
    """how long the step took"""


class Incoming:
    """The other side's vectors, checked and decoded as they come."""

    def __init__(self, cells: Cells, vectors: int) -> None:
        """Expect so many vectors of all cells, one after the other."""
        self._cells = cells
        self._limits = [cells.max_sent_bytes(i) for i in range(len(cells))]
        self._values = torch.empty(vectors, cells.numel)
        self._due = vectors * len(cells)
        self._count = 0
        self._wire_bytes = 0
        self._hash = hashlib.sha256()
        self._rest = bytearray()
        """of a frame that is not whole yet"""

    def take(self, data: memoryview) -> None:
        """Take what came; frames may begin and end anywhere in it.

        Raises:
            UpdateError: it holds more than there is to come, or a frame that is too long.
            CodecError: a frame is no cell of the codec, or holds NaN or infinity.
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
        """Where the frame that begins here ends; None where it is not whole."""
        if at + LENGTH.size > len(self._rest):
            return None
        if self._count == self._due:
            raise UpdateError(f"expected at most {self._due} cells, got more")
        (length,) = LENGTH.unpack_from(self._rest, at)
        limit = self._limits[self._count % len(self._cells)]
        if length > limit:
            raise UpdateError(f"expected a cell of at most {limit} bytes, got one of {length}")
        end = at + LENGTH.size + length
        return end if end <= len(self._rest) else None

    def _decode(self, frame: bytes) -> None:
        vector, index = divmod(self._count, len(self._cells))
        values = self._cells.decode_sent(index, frame)
        if not is_finite(values):
            raise CodecError(f"cell {index}: expected finite numbers, got NaN or infinity")
        self._values[vector, self._cells.values(index, index + 1)] = values
        self._count += 1

    def finish(self, sent: Sent) -> Sequence[Tensor]:
        """The vectors.

        Raises:
            MalformedRecord: cells are missing, or their bytes are not those that were sent.
        """
        whole = self._count == self._due and not self._rest
        if not whole or (self._wire_bytes, self._hash.digest()) != (sent.wire_bytes, sent.digest):
            raise MalformedRecord(
                f"expected {self._due} cells with the digest that was told, got {self._count}, "
                "or other bytes"
            )
        return list(self._values)


class PartnerAhead(Refused):
    """The invited peer refuses because it is in a later round.

    Attributes:
        round: the round that it names.
    """

    def __init__(self, round_: int) -> None:
        super().__init__(RefusalCode.AHEAD, f"the peer is in round {round_}")
        self.round = round_


class Exchange:
    """One side of a meeting on an open stream."""

    def __init__(self, ctx: GossipContext, stream: Stream, mine: Mine, exchange: bytes) -> None:
        """`exchange` names the meeting."""
        self._ctx = ctx
        self._stream = stream
        self._mine = mine
        self._exchange = exchange
        self._stall_s = ctx.settings.stall_s
        self._lock = asyncio.Lock()
        self._theirs: Terms | None = None
        self.times = Times()

    # terms

    async def send_terms(self, *, patience_s: float = 0.0) -> None:
        """Say who is here, with what, and how long it waits."""
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
        """Wait for the other side's; signs of life may come before them.

        Raises:
            PartnerAhead: it is in a later round.
            Refused: it does not meet this peer.
            MalformedRecord: of another round or exchange.
        """
        message = await self._next()
        if message[:1] == AHEAD:
            raise PartnerAhead(Ahead.decode(message[1:]).round)
        if message[:1] != TERMS:
            raise MalformedRecord("expected terms, got another message")
        self.take_terms(Terms.decode(message[1:]))

    def take_terms(self, terms: Terms) -> None:
        """Take the other side's.

        Raises:
            MalformedRecord: of another round or exchange.
            WorkRefused: a weight that does not follow from its work.
        """
        expected = (self._mine.state.position, self._exchange)
        if (terms.round, terms.exchange) != expected:
            raise MalformedRecord(f"expected terms of round {expected[0]}, got {terms.round}")
        check_weight(self._ctx, terms)
        self._theirs = terms
        self.times.accepted = self._ctx.now()

    # vectors

    async def trade(self) -> Met:
        """Send all, receive all, and compute what this side would be left with.

        Raises:
            TransportError, TimeoutError: the other side is gone, or too slow.
            MalformedRecord, UpdateError, CodecError: it sends something else than it should.
        """
        async with asyncio.timeout(self._deadline_s()):
            alive = asyncio.create_task(self._stay_alive())
            try:
                mine, theirs = await _both(self._send(), self._receive())
                return await self._meet(mine, theirs)
            finally:
                alive.cancel()
                await asyncio.gather(alive, return_exceptions=True)

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
        uplinks = (self._ctx.link.uplink_mbit_s, self._terms.uplink_mbit_s or float("inf"))
        return round_deadline_s(3 * sum(self._ctx.cells.sizes), min(uplinks), self._stall_s)

    @property
    def _terms(self) -> Terms:
        if self._theirs is None:
            raise RuntimeError("expected the terms to have been taken")
        return self._theirs

    async def _send(self) -> Side:
        mine, gives = self._mine, handed_over(self._mine.mass, self._terms.mass) > 0
        before = self._ctx.now()
        shown: tuple[Side, bytes] = await self._ctx.compute(show, self._ctx.cells, mine, gives)
        self.times.encode_s = self._ctx.now() - before
        side, data = shown
        for start in range(0, len(data), PACED_BYTES):
            await self._send_paced(data[start : start + PACED_BYTES], start)
        digest = await self._ctx.compute(sha256, data)
        await self._say(tagged(SENT, Sent(wire_bytes=len(data), digest=digest)))
        self.times.sent = self._ctx.now()
        return side

    async def _send_paced(self, message: bytes, number: int) -> None:
        order = (self._mine.state.position, number)
        turn = self._ctx.link.pacer.turn(len(message), order)
        try:
            await turn
        finally:
            turn.cancel()
        await self._say(CELL + message, timeout_s=self._deadline_s())

    async def _receive(self) -> Side:
        terms = self._terms
        gives = handed_over(terms.mass, self._mine.mass) > 0
        incoming = Incoming(self._ctx.cells, 3 if gives else 2)
        while True:
            message = await self._next()
            kind, data = message[:1], memoryview(message)[1:]
            if kind == CELL:
                await self._ctx.compute(incoming.take, data)
            elif kind == SENT:
                break
            else:
                raise MalformedRecord("expected cells, got another message")
        delta_N, params_N, *momentum = incoming.finish(Sent.decode(bytes(data)))
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
        """The inviter's end: commit once the other side is prepared, and tell it.

        Raises:
            TransportError, MalformedRecord: it is not; nothing is committed.
        """
        async with asyncio.timeout(self._deadline_s()):
            if await self._next() != PREPARED:
                raise MalformedRecord("expected word that the other side is prepared")
        commit()
        with suppress(TransportError, TimeoutError):
            await self._say(COMMIT)
            await self._stream.recv(timeout_s=self._stall_s)

    async def follow(self) -> None:
        """The invited side's end: returns when the inviter has committed.

        Raises:
            InDoubt: nobody can tell yet.
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
                raise PeerUnreachable("the stream ended in the middle of a meeting")
            if message != ALIVE:
                return message

    async def _stay_alive(self) -> None:
        with suppress(TransportError):
            while True:
                await asyncio.sleep(self._ctx.alive_s)
                await self._say(ALIVE)


def check_weight(ctx: GossipContext, terms: Terms) -> None:
    """Refuse a weight that does not follow from tokens and steps.

    Raises:
        WorkRefused: it does not, or these are absurd.
    """
    due = work_weight(terms.tokens, terms.steps, ctx.method.weights)
    if terms.weight not in (0.0, due):
        raise WorkRefused(f"expected a weight of {due} or 0, got {terms.weight}")


def show(cells: Cells, mine: Mine, gives: bool) -> tuple[Side, bytes]:
    """What the other side decodes of this one, and the bytes that it is sent.

    Args:
        cells: of the run.
        mine: what this side brings.
        gives: whether it hands over mass, and so its momentum.
    """
    state = mine.state
    packed: list[bytes] = []

    def sent(vector_N: Tensor) -> Tensor:
        frames = cells.encode(vector_N)
        packed.extend(pack(frame) for frame in frames)
        return decoded(cells, frames)

    side = Side(
        delta_N=sent(mine.window.delta_N),
        params_N=sent(state.params_N),
        momentum_N=sent(state.momentum_N) if gives else None,
        mass=mine.mass,
        weight=mine.window.weight,
        steps=mine.window.steps,
    )
    return side, b"".join(packed)


async def _both(
    first: Coroutine[Any, Any, Side], second: Coroutine[Any, Any, Side]
) -> tuple[Side, Side]:
    """Both results; the first failure of either ends the other."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


BROKEN = (TransportError, TimeoutError, MalformedRecord, UpdateError, CodecError, WorkRefused)
"""What ends a meeting before it is agreed."""
