"""A member's side of an all-reduce: its codes go to an owner, the reduced part comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress

from atoll.compression import CodecError
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import beside
from atoll.dht.transport import DeadlineExceeded, PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.reduction.cells import pack
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.peer.rounds.allreduce.factors import FactorReceiver
from atoll.peer.rounds.allreduce.reduction import CellRefused, PartReceiver, batches
from atoll.peer.rounds.allreduce.state import CODES, CONNECT_STALLS, ExchangeState
from atoll.peer.rounds.allreduce.upfront import UpfrontCodes
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    PART_DONE,
    REDUCE,
    PartDone,
    Reduce,
    tagged,
)

# Between two dials of a first contact. libp2p dials nobody for 5 s after a failed dial, and fails
# at once meanwhile: without retries that cost the part.
DIAL_PAUSE_STALLS = 0.1

Receiver = PartReceiver | FactorReceiver
OnResults = Callable[[Receiver], Awaitable[None]]
ToAnswer = asyncio.Queue[list[bytes]]


class _NotUpfront(Exception):  # noqa: N818
    """The owner did not keep the codes that were sent before the group closed."""


class PartLost(Exception):  # noqa: N818
    """The owner of a part is gone, or sends no more of it."""


LOST = (TransportError, CodecError, MalformedRecord, CellRefused, PartLost)
"""what `Sender.exchange` raises"""


class Sender:
    """Exchanges parts with the members that own them, or relay them."""

    def __init__(self, state: ExchangeState, upfront: UpfrontCodes | None) -> None:
        """`upfront` holds the codes that have left already, if they fit the group."""
        self._state = state
        self._upfront = upfront
        self.came_at: dict[int, float] = {}
        """by part: when its last results arrived"""

    async def exchange(self, owner: str, part: int, generation: int) -> None:
        """Send this peer's codes of a part to `owner`, and take the reduced part from it."""
        if self._upfront is not None and generation == 0:
            stream = await self._upfront.stream(part)
            with suppress(_NotUpfront):
                if stream is not None:
                    return await self._continue_upfront(self._upfront, stream, part)
        stream = await self.open(owner)
        to_answer: ToAnswer = asyncio.Queue()
        sending = self._send_codes(stream, part, generation, to_answer)
        await self._converse(stream, sending, part, generation, to_answer)

    async def _continue_upfront(self, upfront: UpfrontCodes, stream: Stream, part: int) -> None:
        """Exchange a part by the stream on which its codes are under way.

        Raises:
            _NotUpfront: the owner did not keep them, or never answered.
        """

        async def sending() -> None:
            await upfront.sent(part)
            self._state.note_sent(part)

        try:
            await self._converse(stream, sending(), part, 0, asyncio.Queue())
        except Refused as error:
            if error.code is RefusalCode.NOT_UPFRONT:
                raise _NotUpfront from error
            raise
        except PeerUnreachable as error:
            if part in self.came_at:
                raise
            raise _NotUpfront from error  # it may have broken long before the group closed

    async def _converse(
        self,
        stream: Stream,
        sending: Coroutine[None, None, None],
        part: int,
        generation: int,
        to_answer: ToAnswer,
    ) -> None:
        try:
            async with beside(sending):
                await self.collect(stream, part, generation, to_answer)
        finally:
            await stream.close()

    async def open(self, owner: str) -> Stream:
        """Open a stream to an owner, and dial again if a dial fails early."""
        ctx, stall_s = self._state.ctx, self._state.group.stall_s
        deadline = ctx.now() + CONNECT_STALLS * stall_s
        while True:
            try:
                left_s = max(deadline - ctx.now(), ctx.alive_s)
                return await ctx.transport.open(owner, "reduce", timeout_s=left_s)
            except PeerUnreachable:
                if ctx.now() >= deadline:
                    raise
            await asyncio.sleep(DIAL_PAUSE_STALLS * stall_s)

    async def _send_codes(
        self, stream: Stream, part: int, generation: int, to_answer: ToAnswer
    ) -> None:
        state = self._state
        await self.send_head(stream, part, generation, sums=False)
        if state.group.members[state.me].weight > 0:
            sent = await self._send_frames(stream, await state.my_codes(part), 0)
            if state.factors is not None:
                await self._send_answers(stream, part, sent, to_answer)
        state.note_sent(part)

    async def send_head(self, stream: Stream, part: int, generation: int, *, sums: bool) -> None:
        """Begin a stream by naming its part, and whether it brings codes or sums."""
        group = self._state.group
        head = Reduce(
            position=group.position,
            group=group.digest,
            part=part,
            generation=generation,
            sums=sums,
        )
        await stream.send(tagged(REDUCE, head), timeout_s=group.stall_s)

    async def _send_frames(self, stream: Stream, frames: Sequence[bytes], first: int) -> int:
        """Send frames from message number `first` on; return the number of the next message."""
        messages = batches([pack(frame) for frame in frames], PACED_BYTES)
        await self._state.send_paced(stream, messages, first, CODES)
        return first + len(messages)

    async def _send_answers(
        self, stream: Stream, part: int, number: int, to_answer: ToAnswer
    ) -> None:
        """Answer each P with a Q, and send keepalives while no P comes."""
        state = self._state
        plan, answered = state.group.parts[part], 0
        while answered < plan.stop_cell - plan.start_cell:
            try:
                async with asyncio.timeout(state.ctx.alive_s):
                    p_frames = await to_answer.get()
            except TimeoutError:
                await stream.send(ALIVE, timeout_s=state.group.stall_s)
                continue
            frames = await state.answers(part, answered, p_frames)
            number = await self._send_frames(stream, frames, number)
            answered += len(p_frames)

    async def collect(
        self,
        stream: Stream,
        part: int,
        generation: int,
        to_answer: ToAnswer,
        on_results: OnResults | None = None,
    ) -> None:
        """Take the results of a part and complete it.

        Frames of P go to `to_answer`. `on_results` is awaited after every message of results.
        """
        state, receiver = self._state, self._receiver(part)
        deadline = state.times.started + state.group.deadline_s + state.group.stall_s
        timeout_s = CONNECT_STALLS * state.group.stall_s
        while state.ctx.now() < deadline:
            message = await stream.recv(timeout_s=timeout_s)
            if message is None:
                raise PartLost("the stream ended before the part was complete")
            if message[:1] == CELL:
                self.came_at[part] = state.ctx.now()
                p_frames = await state.ctx.compute(receiver.take, memoryview(message)[1:])
                if on_results is not None:
                    await on_results(receiver)
                if p_frames:
                    to_answer.put_nowait(p_frames)
                timeout_s = state.group.stall_s
            elif message[:1] == PART_DONE:
                done = PartDone.decode(message[1:])
                if (done.part, done.generation) != (part, generation):
                    raise PartLost("the owner reports another part")
                body = await state.ctx.compute(receiver.finish, done)
                return state.complete(part, body, done, receiver.decoded_N)
        raise DeadlineExceeded(f"expected the part within {state.group.deadline_s:.1f} s")

    def _receiver(self, part: int) -> Receiver:
        state = self._state
        if isinstance(state.cells, LowRankCells):
            return FactorReceiver(part=state.range_of(part), cells=state.cells)
        return PartReceiver(
            part=state.range_of(part),
            members=len(state.group.members),
            out_N=state.take_room(part),
        )
