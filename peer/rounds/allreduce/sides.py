"""Both sides of an all-reduce: codes go to the owners of parts, reduced cells come back.

`ExchangeState` is a member's state in one all-reduce: its contribution, and the parts that are
complete here. A `Sender` sends the contribution to the owner of a part and takes the result. An
`Owner` runs the parts that this peer reduces. Each is an `OwnedPart`: the reducer, and the members
that it still waits for. Relays of large groups reduce in the same way (`rows`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.compression import CodecError
from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, beside, end
from atoll.dht.transport import DeadlineExceeded, PeerUnreachable, Refused, Stream, TransportError
from atoll.optim.log.entry import MalformedRecord
from atoll.optim.log.live_replica import Compute
from atoll.optim.reduction.cells import LENGTH, Bytes, pack
from atoll.optim.reduction.lowrank import Factors, LowRankCells
from atoll.optim.state.updates import Update
from atoll.peer.rounds import notices
from atoll.peer.rounds.allreduce.factors import FactorReceiver, FactorReducer, answers, first_frames
from atoll.peer.rounds.allreduce.reduction import (
    CellRefused,
    Norms,
    PartRange,
    PartReceiver,
    PartReducer,
    Room,
    Rooms,
    Share,
    batches,
)
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.context import Context, Decoded
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    PACED_BYTES,
    PART_DONE,
    REDUCE,
    UPFRONT,
    Group,
    PartDone,
    Plan,
    Reduce,
    Upfront,
    tagged,
)
from atoll.peer.rounds.policies import is_slow, laggards

CODES, RESULTS = 0, 1  # codes go first: every owner waits for them, and results follow from them
# A first contact may have to dial. Together with the slack of a stall, two members that are cut off
# from each other then cost a round less than 3 s at the default stall of 1.5 s; it was 5.1 s with
# a first contact of 3 stalls.
CONNECT_STALLS = 1.5
SEND_STALLS = 20  # for one message: the owner reads it at once, but may have a slow link


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
    ctx: Context, stream: Stream, messages: Iterable[Bytes], first: int, bulk: Bulk
) -> int:
    """Send messages as the pacer grants their turns, with keepalives while they wait.

    Args:
        ctx: this peer's.
        stream: to the receiver.
        messages: without the byte of their kind; each is taken when the one before has left.
        first: number of the first message on this stream.
        bulk: their rank.

    Returns:
        The number of the next message.
    """
    number = first
    for message in messages:
        order = (bulk.position, bulk.leg, number, bulk.turn)
        turn = ctx.link.pacer.turn(len(message), order)
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=ctx.alive_s)
                if not turn.done():
                    await stream.send(ALIVE, timeout_s=ctx.settings.stall_s)
        finally:
            turn.cancel()
        await stream.send(b"".join((CELL, message)), timeout_s=bulk.timeout_s)
        number += 1
    return number


class ExchangeState:
    """One group's all-reduce as one of its members holds it."""

    def __init__(self, ctx: Context, group: Group, codes: Sequence[Bytes]) -> None:
        self.ctx = ctx
        self.group = group
        self.digest = group.digest
        """once: that of a large group takes milliseconds"""
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

    def _rooms_of_parts(self) -> dict[int, Room]:
        if isinstance(self.cells, LowRankCells):
            return {}
        ranges = [self.range_of(part) for part in range(len(self.group.parts))]
        # Gathered frames may be many times shorter than the longest.
        longest = () if self.cells.gathers else [each.max_bytes(1) for each in ranges]
        values = [each.values for each in ranges]
        rooms = Rooms(values, longest, self.ctx.replica.allocate)
        return {part: rooms.room(part) for part in range(len(ranges))}

    def take_room(self, part: int) -> Room | None:
        """Return the part's place beside the others; None if it is taken.

        A part that is reduced again gets memory of its own, because a thread of the earlier
        generation may still write to this one.
        """
        return self._rooms.pop(part, None)

    async def my_codes(self, part: int) -> Sequence[Bytes]:
        """Return this peer's frames of a part; of low-rank cells, the frames of P."""
        plan = self.group.parts[part]
        if self.factors is None:
            return self._codes[plan.start_cell : plan.stop_cell]
        frames: list[bytes] = await self.ctx.compute(
            first_frames, self.factors, plan.start_cell, plan.stop_cell
        )
        return frames

    async def answers(self, part: int, first: int, p_frames: Sequence[Bytes]) -> list[bytes]:
        """Return this peer's frames of Q for frames of P, from the part's cell `first` on."""
        start_cell = self.group.parts[part].start_cell + first
        frames: list[bytes] = await self.ctx.compute(answers, self.factors, start_cell, p_frames)
        return frames

    async def send_paced(
        self, stream: Stream, messages: Iterable[Bytes], first: int, leg: int
    ) -> int:
        """Send codes or results to a member in their turns; see the function `send_paced`."""
        bulk = Bulk(
            position=self.group.position,
            leg=leg,
            turn=(self.member(stream.remote) - self.me) % len(self.group.members),
            timeout_s=self.group.deadline_s if leg == CODES else self.group.stall_s,
        )
        return await send_paced(self.ctx, stream, messages, first, bulk)

    def note_sent(self, part: int) -> None:
        """Note that this peer's codes of a part have left."""
        self._unsent.discard(part)
        if not self._unsent and self.times.sent is None:
            self.times.sent = self.ctx.now()

    def complete(self, part: int, body: Bytes, done: PartDone, decoded_N: Update) -> None:
        """Take a reduced part whose bytes are checked."""
        plan = self.group.parts[part]
        decoded = Decoded(plan.start_cell, plan.stop_cell, decoded_N)
        self.ctx.parts.put(self.group.position, done.digest, body, decoded)
        self.parts[part] = done
        self.on_part()
        if len(self.parts) == len(self.group.parts):
            self.times.reduced = self.ctx.now()

    @property
    def round(self) -> int:
        """The round that the group's entry would commit."""
        return self.group.position + 1

    def log(self, notice: Notice, level: Level = "warning") -> None:
        """Report a fault of another member in this round."""
        # Bytes sent to a dead peer are never confirmed. Read as a slow link they would pace this
        # peer's later rounds, so nothing is learnt from this one.
        self.watch.disturbed = True
        self.ctx.on_event(level, notice)


# Between two dials of a first contact. libp2p dials nobody for 5 s after a failed dial, and fails
# at once meanwhile: without retries that cost the part.
DIAL_PAUSE_STALLS = 0.1

Receiver = PartReceiver | FactorReceiver
OnResults = Callable[[Receiver], Awaitable[None]]
ToAnswer = asyncio.Queue[list[bytes]]


class UpfrontCodes:
    """One contribution on its way to the owners of a plan.

    Owners are served in turn, beginning with this peer's successor, so that all do not send to the
    same owner first.
    """

    def __init__(self, ctx: Context, plan: Plan, codes: Sequence[Bytes], norm: float) -> None:
        """Begin to send.

        Args:
            ctx: the sender's.
            plan: the expected parts and their owners.
            codes: a frame for each cell of the position.
            norm: declared for the contribution; owners tell contributions apart by it.
        """
        self._ctx = ctx
        self._plan = plan
        self._codes = codes
        self._norm = norm
        self.digest = plan.digest
        me = ctx.me.peer_id
        others = [index for index, part in enumerate(plan.parts) if part.owner != me]
        loop = asyncio.get_running_loop()
        self._streams: dict[int, asyncio.Future[Stream | None]] = {
            index: loop.create_future() for index in others
        }
        self._work = Tasks()
        self._sends = {index: self._work.spawn(self._send(index)) for index in others}
        self._watch = ctx.link.watch(ctx.transport)
        self._work.spawn(self._end_watch())

    async def stream(self, part: int) -> Stream | None:
        """Return the stream of a part's codes; None if its owner was not reached."""
        opened = self._streams.get(part)
        return await asyncio.shield(opened) if opened is not None else None

    async def sent(self, part: int) -> None:
        """Wait until a part's codes have left, or could not leave."""
        await asyncio.wait({self._sends[part]})

    async def close(self) -> None:
        """End all sends and streams."""
        await self._work.close()
        self._watch.close()
        for opened in self._streams.values():
            stream = opened.result() if opened.done() else None
            if stream is not None:
                await stream.close()

    async def _end_watch(self) -> None:
        # Codes that have left make no load: the link is not measured while the group is awaited.
        if self._sends:
            await asyncio.wait(self._sends.values())
        self._watch.pause()

    async def _send(self, index: int) -> None:
        part, opened = self._plan.parts[index], self._streams[index]
        stall_s = self._ctx.settings.stall_s
        try:
            stream = await self._ctx.transport.open(part.owner, "reduce", timeout_s=stall_s)
            opened.set_result(stream)
        except TransportError:
            return
        finally:
            if not opened.done():  # `stream` waits for it, whatever went wrong
                opened.set_result(None)
        head = Upfront(
            position=self._plan.position,
            plan=self.digest,
            part=index,
            norm=self._norm,
        )
        frames = map(pack, self._codes[part.start_cell : part.stop_cell])
        bulk = Bulk(
            position=self._plan.position,
            leg=CODES,
            turn=self._turn(part.owner),
            timeout_s=SEND_STALLS * stall_s,
        )
        with suppress(TransportError):  # the reader of the owner's answers gets the same error
            await stream.send(tagged(UPFRONT, head), timeout_s=stall_s)
            await send_paced(self._ctx, stream, batches(frames, PACED_BYTES), 0, bulk)

    def _turn(self, owner: str) -> int:
        owners = sorted({part.owner for part in self._plan.parts})
        return (owners.index(owner) - bisect(owners, self._ctx.me.peer_id)) % len(owners)


class _NotUpfront(Exception):
    """The owner did not keep the codes that were sent before the group closed."""


class PartLost(Exception):
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
        state = self._state
        head = Reduce(
            position=state.group.position,
            group=state.digest,
            part=part,
            generation=generation,
            sums=sums,
        )
        await stream.send(tagged(REDUCE, head), timeout_s=state.group.stall_s)

    async def _send_frames(self, stream: Stream, frames: Sequence[Bytes], first: int) -> int:
        """Send frames from message number `first` on; return the number of the next message."""
        messages = batches(map(pack, frames), PACED_BYTES)
        return await self._state.send_paced(stream, messages, first, CODES)

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
            room=state.take_room(part),
        )


# Of the deadline. A slow sender then costs only its own contribution: an owner loses its part to
# another one after 3/4 of the deadline (`consensus.parts`), and the round ends later still.
SENDERS_SHARE = 0.5
LONE_SHARE = 1 / 8  # in which a vector travels once at the rate by which the deadline is computed


@dataclass(kw_only=True)
class Arrival:
    """Cells of a member on their way into the reduction."""

    member: int
    cells: memoryview | Sequence[Bytes]
    """a message, or frames"""
    error: CodecError | CellRefused | None = None


@dataclass(kw_only=True)
class OwnedPart:
    """A part that this peer reduces."""

    reducer: PartReducer | FactorReducer
    compute: Compute
    waiting: set[int]
    """members that have not opened their stream yet"""
    senders: frozenset[int] = frozenset()
    """members whose progress is compared; none if sums of rows come"""
    came: set[int] = field(default_factory=set)
    """members that have opened their stream: cells are taken from one stream only"""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    arrived: list[Arrival] = field(default_factory=list)
    """cells that no job has taken yet"""

    @property
    def results(self) -> Sequence[Bytes]:
        """The results so far, each frame as members get it."""
        return self.reducer.frames

    def check(self) -> None:
        """Raise `Refused` if no more results will come; an owner computes its own."""

    async def result(self, part: int, generation: int) -> PartDone:
        """Return the owner's report on the part, once all results are there."""
        done: PartDone
        _, done = await self.compute(self.reducer.done, part, generation)
        return done

    async def silent(self, now: float, connect_by: float, gone: Collection[int]) -> set[int]:
        """Return members to wait for no longer: their stream is late, or they are gone."""
        return set(self.waiting) if now >= connect_by else self.waiting & set(gone)

    async def give_up(self) -> set[int]:
        """Return the members whose cells are missing; the deadline has passed."""
        return self.reducer.waiting_for

    def to_leave_out(self, members: Iterable[int]) -> Iterable[int]:
        """Return those of `members` that the part has to do without; here all of them."""
        return members

    async def add(self, member: int, cells: memoryview | Sequence[Bytes]) -> None:
        """Add a message or frames; one job takes all that arrived while the last one ran.

        Raises:
            CodecError, CellRefused: as `PartReducer.add_all`.
        """
        arrival = Arrival(member=member, cells=cells)
        self.arrived.append(arrival)
        async with self.lock:
            batch, self.arrived = self.arrived, []
            if batch:
                await self._do(partial(accumulate, self.reducer, batch))
        if arrival.error is not None:
            raise arrival.error

    async def drop(self, member: int) -> None:
        """Stop waiting for a member, and encode the cells that are complete without it."""
        self.waiting.discard(member)
        self.reducer.drop(member)
        await self.encode()

    async def encode(self) -> None:
        """Encode the cells that are complete."""
        async with self.lock:
            await self._do(self.reducer.advance)

    async def await_change(
        self, timeout_s: float, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait for a change, at most so long and not if `unless` holds; False if none came."""
        async with self.changed:
            if unless():
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
                return True
        return False

    async def await_frames(self, sent: int, timeout_s: float) -> bool:
        """Wait for more results than were sent, or a change; False if neither came in time."""
        return await self.await_change(timeout_s, lambda: len(self.results) > sent)

    async def await_end(self, timeout_s: float) -> None:
        """Wait until every cell is encoded, something changes, or the time is over."""
        await self.await_change(timeout_s, lambda: self.reducer.finished)

    async def _do(self, job: Callable[[], object]) -> None:
        # Waiting streams are woken only if the job made more frames. All of them wait for results
        # while everybody's cells arrive: if every arrival woke them, a thousand members would
        # wake each other a million times for one part.
        before = len(self.reducer.frames)
        await self.compute(job)
        if len(self.reducer.frames) > before:
            await self.notify()

    async def notify(self) -> None:
        """Wake all that wait for a change."""
        async with self.changed:
            self.changed.notify_all()


def accumulate(reducer: PartReducer | FactorReducer, batch: Sequence[Arrival]) -> None:
    """Add arrivals, each member's up to its first error, and encode the cells that are complete."""
    for arrival in batch:
        try:
            reducer.add_all(arrival.member, arrival.cells)
        except (CodecError, CellRefused) as error:
            arrival.error = error
    reducer.advance()


class Owner:
    """Reduces the parts of a group that one member owns, or relays."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self.parts: dict[tuple[int, int], OwnedPart] = {}
        """by part and generation"""
        self.credits: dict[int, Update] = {}
        self.rejected: dict[int, float] = {}
        self.reports: asyncio.Queue[PartDone] = asyncio.Queue()
        self._norms: dict[int, Norms] = {}
        self._remembered: set[int] = set()
        """members that lagged in this round, which is one fault, however many parts it had"""

    def norms(self, generation: int) -> Norms:
        """Return the members' norms over all parts that this peer owns in a generation."""
        return self._norms.setdefault(generation, Norms())

    def make_part(self, part: int, generation: int, senders: Collection[int]) -> OwnedPart:
        """Return a part that waits for the cells of `senders`."""
        state, shares, norms = self._state, self._state.shares(), self.norms(generation)
        cells = state.range_of(part)
        reducer: PartReducer | FactorReducer
        if isinstance(state.cells, LowRankCells):
            reducer = FactorReducer(part=cells, cells=state.cells, shares=shares, norms=norms)
        else:
            room = state.take_room(part)
            reducer = PartReducer(
                part=cells, shares=shares, rule=state.ctx.rule_in_force, norms=norms, room=room
            )
        expected = (set(shares) & set(senders)) - self.barred()
        for index in set(shares) - expected:
            reducer.drop(index)
        waiting = expected - {state.me}
        return OwnedPart(
            reducer=reducer,
            compute=state.ctx.compute,
            waiting=waiting,
            senders=frozenset(waiting),
        )

    def barred(self) -> set[int]:
        """Return the members that are banned now: this owner takes none of their cells."""
        state, barred = self._state, set()
        ctx, now = state.ctx, state.ctx.now()
        for index in range(len(state.group.members)):
            peer = state.peer(index)
            is_barred = ctx.conduct.barred(peer, now) is not None
            if index != state.me and (is_barred or ctx.lags.barred(peer, now) is not None):
                barred.add(index)
                reason = "banned" if is_barred else "sent far less before"
                state.left_out.setdefault(index, reason)
        return barred

    async def reduce(self, part: int, generation: int) -> None:
        """Reduce one of `parts`, of which this peer is the owner."""
        owned = self.parts[part, generation]
        self._state.note_sent(part)
        async with beside(self.add_own(owned, part)):
            await self.await_senders(owned)
        body, done = await self._state.ctx.compute(owned.reducer.done, part, generation)
        if (credit := owned.reducer.credit_N) is not None:
            self.credits[part] = credit
        self.rejected[part] = owned.reducer.rejected
        self._state.complete(part, body, done, owned.reducer.decoded_N)
        self.reports.put_nowait(done)

    async def add_own(self, owned: OwnedPart, part: int) -> None:
        """Add this peer's own cells, and answer frames of P if they are of low rank."""
        state = self._state
        try:
            await owned.add(state.me, await state.my_codes(part))
            answered = 0
            while state.factors is not None and answered < owned.reducer.part.num_cells:
                p_frames = owned.reducer.frames[answered : owned.reducer.part.num_cells]
                if not p_frames:
                    await owned.await_frames(answered, state.ctx.alive_s)
                    continue
                bare = [frame[LENGTH.size :] for frame in p_frames]
                await owned.add(state.me, await state.answers(part, answered, bare))
                answered += len(p_frames)
        except (CodecError, CellRefused) as error:
            # This peer's own cells are bad. The others still need the part: an owner that ended
            # its task here once made the whole round end in NULL.
            await self.drop(owned, self._state.me, reason=_bad_cell(error), level="error")

    async def await_senders(self, owned: OwnedPart, share: float = SENDERS_SHARE) -> None:
        """Wait for all cells, but no longer than `share` of the deadline for slow senders."""
        state = self._state
        started, limit_s = state.ctx.now(), state.group.deadline_s
        connect_by = started + CONNECT_STALLS * state.group.stall_s
        complete_by = min(started + share * limit_s, state.times.started + limit_s)
        took_s: dict[int, float] = {}
        while not owned.reducer.finished:
            now = state.ctx.now()
            done = {m for m in owned.senders if not owned.reducer.waits_for(m)}
            took_s |= dict.fromkeys(done - took_s.keys(), now - started)
            if silent := await owned.silent(now, connect_by, state.gone):
                await self.drop(owned, *silent, reason="sent nothing")
            elif now >= complete_by and (late := await owned.give_up()):
                await self.drop(owned, *late, reason="missed the deadline")
            elif lagging := self._lagging(owned, took_s, now - started):
                self._remember(owned, lagging)
                await self.drop(owned, *lagging, reason="sent far less than the others")
            else:
                if not owned.reducer.waiting_for:
                    await owned.encode()  # no arrival does, if nobody may send
                await owned.await_end(state.ctx.alive_s)

    def _lagging(self, owned: OwnedPart, took_s: Mapping[int, float], waited_s: float) -> set[int]:
        num_cells = owned.reducer.part.num_cells
        progress = {m: owned.reducer.arrived(m) / num_cells for m in owned.senders}
        stall_s = self._state.group.stall_s
        lone_s = self._state.group.deadline_s * LONE_SHARE
        return laggards(progress, took_s, waited_s=waited_s, stall_s=stall_s, lone_s=lone_s)

    def _remember(self, owned: OwnedPart, members: Collection[int]) -> None:
        """Note a fault of members that lag, unless they said that they are slow and send."""
        uplinks = [report.uplink_mbit_s for report in self._state.group.reports]
        for member in set(members) - self._remembered:
            self._remembered.add(member)
            is_honest = bool(uplinks) and is_slow(uplinks[member], uplinks)
            if not (is_honest and owned.reducer.arrived(member)):
                ctx, peer = self._state.ctx, self._state.peer(member)
                if ctx.lags.fault(peer, Fault.NO_PROGRESS, ctx.now()) is not None:
                    self._state.log(notices.not_waiting(round=self._state.round, peer=peer))

    async def serve(self, remote: str, head: Reduce, stream: Stream) -> None:
        """Take a member's cells of one part, and send it the results.

        The owner stops waiting for a member as soon as either direction of its stream breaks.
        """
        member = self._state.member(remote)
        owned = await self.await_part(head)
        if member in owned.came:
            raise Refused(
                RefusalCode.REPLAYED,
                f"part {head.part}.{head.generation} already has a stream from this member",
            )
        owned.came.add(member)
        owned.waiting.discard(member)
        receiving = asyncio.create_task(self._receive(owned, member, stream))
        try:
            await self.send_results(owned, head, stream)
            await receiving
        except TransportError as error:
            if owned.reducer.waits_for(member):
                await self.drop(owned, member, reason=str(error))
            raise
        finally:
            if not receiving.done():
                await end(receiving)

    async def await_part(self, head: Reduce) -> OwnedPart:
        """Return the part that a stream is for; raise `Refused` if it is not reduced here."""
        # The order to repair a part reaches members at different times, so a member's stream may
        # arrive before the new owner knows of its part.
        state = self._state
        deadline = state.ctx.now() + CONNECT_STALLS * state.group.stall_s
        while (owned := self.parts.get((head.part, head.generation))) is None:
            if state.ctx.now() > deadline:
                raise Refused(
                    RefusalCode.NOT_THE_OWNER,
                    f"part {head.part}.{head.generation} is not reduced here",
                )
            await asyncio.sleep(state.ctx.alive_s / 4)
        return owned

    async def _receive(self, owned: OwnedPart, member: int, stream: Stream) -> None:
        try:
            while owned.reducer.waits_for(member):
                message = await stream.recv(timeout_s=self._state.group.stall_s)
                if message is None:
                    raise PeerUnreachable("the stream ended before the part was complete")
                if message == ALIVE:
                    continue
                if message[:1] != CELL:
                    raise CellRefused(f"expected chunks, got a message of kind {message[:1]!r}")
                await owned.add(member, memoryview(message)[1:])
        except TransportError as error:
            await self.drop(owned, member, reason=str(error))
        except (CodecError, CellRefused) as error:
            await self.drop(owned, member, reason=_bad_cell(error), level="error")
            self._state.ctx.fault(self._state.peer(member), Fault.BAD_CELL)
            raise Refused(RefusalCode.BAD_CELL, str(error)) from None

    async def send_results(self, owned: OwnedPart, head: Reduce, stream: Stream) -> None:
        """Send the results of a part as they complete, and then the report on it."""
        stall_s, sent, number = self._state.group.stall_s, 0, 0
        while sent < owned.reducer.num_frames:
            owned.check()
            frames = owned.results[sent:]
            messages = batches(frames, PACED_BYTES)
            number = await self._state.send_paced(stream, messages, number, RESULTS)
            sent += len(frames)
            if not frames and not await owned.await_frames(sent, self._state.ctx.alive_s):
                await stream.send(ALIVE, timeout_s=stall_s)
        done = await owned.result(head.part, head.generation)
        await stream.send(tagged(PART_DONE, done), timeout_s=stall_s)

    async def drop(
        self, owned: OwnedPart, *members: int, reason: str, level: Level = "warning"
    ) -> None:
        """Continue a part without members; their cells that arrived still count."""
        for member in owned.to_leave_out(members):
            self._state.left_out.setdefault(member, reason)
            dropped = notices.member_dropped(
                round=self._state.round, peer=self._state.peer(member), reason=reason
            )
            self._state.log(dropped, level)
            await owned.drop(member)


def _bad_cell(error: Exception) -> str:
    return f"{Fault.BAD_CELL}: {error}"
