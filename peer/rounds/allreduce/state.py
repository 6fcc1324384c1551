"""A member's state in one all-reduce: its contribution, and the parts that are complete here.

The two sides of an exchange share it: `sender` sends the contribution to the owners of parts,
`owner` reduces the parts that this peer owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.coordinator.run.levels import Level
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, Stream
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.optim.state import vectors
from atoll.optim.state.updates import Update
from atoll.peer.rounds.allreduce.factors import answers, first_frames
from atoll.peer.rounds.allreduce.reduction import PartRange, Share
from atoll.peer.rounds.context import Context
from atoll.peer.rounds.messages import ALIVE, CELL, Group, PartDone

CODES, RESULTS = 0, 1  # codes go first: every owner waits for them, and results follow from them
# A first contact may have to dial. Together with the slack of a stall, two members that are cut off
# from each other then cost a round less than 3 s at the default stall of 1.5 s; it was 5.1 s with
# a first contact of 3 stalls.
CONNECT_STALLS = 1.5


@dataclass(kw_only=True)
class ExchangeTimes:
    """Times of events, in seconds on the context's clock; None until they happen."""

    started: float
    sent: float | None = None
    reduced: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bulk:
    """The rank of a stream's messages among all that wait to leave, and their time limit."""

    position: int
    leg: int
    """`CODES` or `RESULTS`"""
    turn: int
    """receivers are served in turn, and each peer begins with its successor"""
    timeout_s: float


async def send_paced(
    ctx: Context, stream: Stream, messages: Collection[bytes], first: int, bulk: Bulk
) -> None:
    """Send messages as the pacer grants their turns, with keepalives while they wait.

    Args:
        ctx: this peer's.
        stream: to the receiver.
        messages: without the byte of their kind.
        first: number of the first message on this stream.
        bulk: their rank.
    """
    for number, message in enumerate(messages, first):
        order = (bulk.position, bulk.leg, number, bulk.turn)
        turn = ctx.link.pacer.turn(len(message), order)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=ctx.alive_s)
                if not turn.done():
                    await stream.send(ALIVE, timeout_s=ctx.settings.stall_s)
        finally:
            turn.cancel()
        await stream.send(CELL + message, timeout_s=bulk.timeout_s)


class ExchangeState:
    """One group's all-reduce as one of its members holds it."""

    def __init__(self, ctx: Context, group: Group, codes: Sequence[bytes]) -> None:
        self.ctx = ctx
        self.group = group
        self.cells = ctx.replay.cells_at(group.position)
        self._codes = codes
        self.factors: Factors | None = None
        """this peer's side of a low-rank exchange"""
        if isinstance(self.cells, LowRankCells) and codes:
            self.factors = Factors(self.cells, ctx.replica.state, codes)
        self._index = {m.peer_id: index for index, m in enumerate(group.members)}
        self.me = self._index[ctx.me.peer_id]
        self.parts: dict[int, PartDone] = {}
        self.on_part: Callable[[], None] = lambda: None
        self.left_out: dict[int, str] = {}
        self.times = ExchangeTimes(started=ctx.now())
        self._unsent = set(range(len(group.parts)))
        self.gone: set[int] = set()
        """members whose session with the leader has ended"""
        self._rooms = self._rooms_of_parts()
        self.watch = ctx.link.watch(ctx.transport)

    def member(self, remote: str) -> int:
        """Return the index of a peer in the group; raise `Refused` if it is no member."""
        if remote not in self._index:
            raise Refused(RefusalCode.NOT_A_MEMBER, f"expected a member of the group, got {remote}")
        return self._index[remote]

    def peer(self, member: int) -> str:
        """Return a member's PeerID."""
        return self.group.members[member].peer_id

    def range_of(self, part: int) -> PartRange:
        """Return the cells of a part."""
        plan = self.group.parts[part]
        return PartRange(start_cell=plan.start_cell, stop_cell=plan.stop_cell, cells=self.cells)

    def shares(self) -> dict[int, Share]:
        """Return the shares of the members that have a weight."""
        return {
            index: Share(weight=member.weight, clip=member.clip, norm=member.norm)
            for index, member in enumerate(self.group.members)
            if member.weight > 0
        }

    def _rooms_of_parts(self) -> dict[int, Tensor]:
        # All parts are decoded into slices of one vector, so the update is never copied together.
        if isinstance(self.cells, LowRankCells) or self.cells.scatters:
            return {}
        update_F = vectors.empty(self.cells.numel)
        parts = range(len(self.group.parts))
        return {part: update_F[self.range_of(part).values] for part in parts}

    def take_room(self, part: int) -> Tensor | None:
        """Return the part's place in the update; None if it is taken.

        A part that is reduced again gets memory of its own, because a thread of the earlier
        generation may still write to this one.
        """
        return self._rooms.pop(part, None)

    async def my_codes(self, part: int) -> Sequence[bytes]:
        """Return this peer's frames of a part; of low-rank cells, the frames of P."""
        plan = self.group.parts[part]
        if self.factors is None:
            return self._codes[plan.start_cell : plan.stop_cell]
        frames: list[bytes] = await self.ctx.compute(
            first_frames, self.factors, plan.start_cell, plan.stop_cell
        )
        return frames

    async def answers(self, part: int, first: int, p_frames: Sequence[bytes]) -> list[bytes]:
        """Return this peer's frames of Q for frames of P, from the part's cell `first` on."""
        start_cell = self.group.parts[part].start_cell + first
        frames: list[bytes] = await self.ctx.compute(answers, self.factors, start_cell, p_frames)
        return frames

    async def send_paced(
        self, stream: Stream, messages: Collection[bytes], first: int, leg: int
    ) -> None:
        """Send codes or results to a member in their turns; see the function `send_paced`."""
        bulk = Bulk(
            position=self.group.position,
            leg=leg,
            turn=(self.member(stream.remote) - self.me) % len(self.group.members),
            timeout_s=self.group.deadline_s if leg == CODES else self.group.stall_s,
        )
        await send_paced(self.ctx, stream, messages, first, bulk)

    def note_sent(self, part: int) -> None:
        """Note that this peer's codes of a part have left."""
        self._unsent.discard(part)
        if not self._unsent and self.times.sent is None:
            self.times.sent = self.ctx.now()

    def complete(self, part: int, body: bytes, done: PartDone, decoded_N: Update) -> None:
        """Take a reduced part whose bytes are checked."""
        self.ctx.parts.put(self.group.position, done.digest, body, decoded_N)
        self.parts[part] = done
        self.on_part()
        if len(self.parts) == len(self.group.parts):
            self.times.reduced = self.ctx.now()

    def log(self, text: str, level: Level = "warning") -> None:
        """Report a fault of another member in this round."""
        # Bytes sent to a dead peer are never confirmed. Read as a slow link they would pace this
        # peer's later rounds, so nothing is learnt from this one.
        self.watch.disturbed = True
        self.ctx.on_event(level, f"round {self.group.position + 1}: {text}")
