"""A member's place in a group: what it has to send, and what is complete here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, Stream
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.optim.state import vectors
from atoll.optim.state.updates import Update
from atoll.peer.rounds.allreduce.factors import answers, first_frames
from atoll.peer.rounds.allreduce.reduction import PartRange, Share
from atoll.peer.rounds.allreduce.sending import CODES, Bulk, send_paced
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import Group, PartDone

# A first contact may have to dial; together with a stall's slack a pair that is cut off from each
# other then costs a round less than 3 s at the default stall of 1.5 s.
CONNECT_STALLS = 1.5


@dataclass(kw_only=True)
class ExchangeTimes:
    """When things were done, seconds on the context's clock; None while they are not."""

    started: float
    sent: float | None = None
    reduced: float | None = None


class Seat:
    """What both sides of an `Exchange` share."""

    def __init__(self, ctx: Context, group: Group, codes: Sequence[bytes]) -> None:
        """Nothing is sent yet; see `Exchange`."""
        self._ctx = ctx
        self.group = group
        self.digest = group.digest
        self.cells = ctx.replay.cells_at(group.position)
        self._codes = codes
        self._factors: Factors | None = None
        if isinstance(self.cells, LowRankCells) and codes:
            self._factors = Factors(self.cells, ctx.replica.state, codes)
        self._index = {m.peer_id: index for index, m in enumerate(group.members)}
        self.me = self._index[ctx.me.peer_id]
        self.parts: dict[int, PartDone] = {}
        self.on_part: Callable[[], None] = lambda: None
        """called whenever a part is complete here, so that a leader goes on at once"""
        self.left_out: dict[int, str] = {}
        """members that this peer went on without, and why"""
        self.times = ExchangeTimes(started=ctx.now())
        self._unsent = set(range(len(group.parts)))
        self._gone: set[int] = set()
        self._rooms = self._rooms_of_parts()
        self._watch = ctx.link.watch(ctx.transport)

    async def _send_paced(
        self, stream: Stream, messages: Collection[bytes], first: int, leg: int
    ) -> None:
        to = self._member(stream.remote)
        bulk = Bulk(
            position=self.group.position,
            leg=leg,
            turn=(to - self.me) % len(self.group.members),
            timeout_s=self.group.deadline_s if leg == CODES else self.group.stall_s,
        )
        await send_paced(self._ctx, stream, messages, first, bulk)

    def _member(self, remote: str) -> int:
        if remote not in self._index:
            raise Refused(RefusalCode.NOT_A_MEMBER, f"expected a member of the group, got {remote}")
        return self._index[remote]

    def range_of(self, part: int) -> PartRange:
        """The cells of a part."""
        plan = self.group.parts[part]
        return PartRange(start_cell=plan.start_cell, stop_cell=plan.stop_cell, cells=self.cells)

    def _rooms_of_parts(self) -> dict[int, Tensor]:
        """Where each part is decoded to in the update, so that nothing has to be put together.

        Taken once: a part that is reduced again has memory of its own, since a thread may still be
        at the first.
        """
        if isinstance(self.cells, LowRankCells) or self.cells.scatters:
            return {}
        update_F = vectors.empty(self.cells.numel)
        parts = range(len(self.group.parts))
        return {part: update_F[self.range_of(part).values] for part in parts}

    def _shares(self) -> dict[int, Share]:
        """Of the members whose work counts."""
        return {
            index: Share(weight=member.weight, clip=member.clip, norm=member.norm)
            for index, member in enumerate(self.group.members)
            if member.weight > 0
        }

    async def _my_codes(self, part: int) -> Sequence[bytes]:
        plan = self.group.parts[part]
        if self._factors is None:
            return self._codes[plan.start_cell : plan.stop_cell]
        frames: list[bytes] = await self._ctx.compute(
            first_frames, self._factors, plan.start_cell, plan.stop_cell
        )
        return frames

    async def _answers(self, part: int, first: int, p_frames: Sequence[bytes]) -> list[bytes]:
        """This peer's frames of Q for frames of P, of a part's cells from ``first`` on."""
        start_cell = self.group.parts[part].start_cell + first
        frames: list[bytes] = await self._ctx.compute(answers, self._factors, start_cell, p_frames)
        return frames

    def _complete(self, part: int, body: bytes, done: PartDone, decoded_N: Update) -> None:
        self._ctx.parts.put(self.group.position, done.digest, body, decoded_N)
        self.parts[part] = done
        self.on_part()
        if len(self.parts) == len(self.group.parts):
            self.times.reduced = self._ctx.now()

    def _note_sent(self) -> None:
        if not self._unsent and self.times.sent is None:
            self.times.sent = self._ctx.now()
