"""The rounds of one peer: one position after another, until told to stop.

The engine joins or leads attempts with this peer's contribution, votes, serves what others ask
for, and keeps the replica at the head of the log.  It decides nothing by itself: when a group
closes, who reduces and what counts are in ``policies``, ``leader``, ``voter`` and ``optim.log``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.feedback import Offer
from atoll.optim.log import Certificate, Entry, MalformedRecord, check_certificate
from atoll.optim.weights import work_weight
from atoll.peer.replica import Applied
from atoll.peer.rounds.ballot import Leads, Place, leader_of
from atoll.peer.rounds.context import Context, short
from atoll.peer.rounds.exchange import Exchange
from atoll.peer.rounds.guard import guarded_call, guarded_stream
from atoll.peer.rounds.leader import Leadership
from atoll.peer.rounds.local import LocalStream, stream_pair
from atoll.peer.rounds.member import CONNECT_STALLS, AttemptFailed, join
from atoll.peer.rounds.messages import (
    PROTOCOL,
    READY,
    REDUCE,
    Decided,
    Head,
    Ready,
    Reduce,
)
from atoll.peer.rounds.serving import Archive
from atoll.peer.rounds.trace import RoundTrace, round_trace
from atoll.peer.rounds.voter import Voter

T = TypeVar("T")

CATCH_UP_TRIES = 4  # a commit may be under way: look again this often before refusing a peer


@dataclass(frozen=True, kw_only=True)
class OfferedWindow:
    """A contribution as it is offered at the current position."""

    number: int
    """counts the offers of this process, so that a settlement finds its own"""
    fragment: int = 0
    offer: Offer
    tokens: int
    steps: int
    loss: float | None


@dataclass(kw_only=True)
class Pending:
    """The contribution that waits for a decision."""

    window: OfferedWindow
    since: float
    exchange: Exchange | None = None


@dataclass(kw_only=True)
class RoundsStatistics:
    """How the rounds of this peer are."""

    phase: str = "idle"
    position: int = 0
    rounds: int = 0
    included: int = 0
    left_out: int = 0
    attempts_failed: int = 0
    last: RoundTrace | None = None


@dataclass(kw_only=True)
class Settled:
    """A position that was decided, with what it means for this peer."""

    applied: Applied
    included: list[bool] | None
    settles: int | None
    """the number of the contribution that was on offer when it was decided"""
    credits: list[tuple[slice, Tensor]] = field(default_factory=list)
    trace: RoundTrace | None = None


class Rounds:
    """The engine.  ``serve`` once, then ``run`` as a task."""

    def __init__(
        self,
        ctx: Context,
        *,
        catch_up: Callable[[], Awaitable[None]],
        on_settled: Callable[[Settled], None],
        on_phase: Callable[[str, int], None],
        on_led: Callable[[Entry, Certificate, bytes], None],
        uplink_mbit_s: float = 0.0,
    ) -> None:
        """Callbacks run on the event loop and must return at once.

        ``uplink_mbit_s`` is what the owner declares; at 0 the rounds measure it.

        ``on_led`` is told of entries that this peer led to their certificate.
        """
        self._ctx = ctx
        self._catch_up = catch_up
        self._on_settled = on_settled
        self._on_phase = on_phase
        self._on_led = on_led
        ctx.link.declare(uplink_mbit_s)
        self.voter = Voter(ctx)
        self._archive = Archive(ctx)
        self._pending: dict[int, Pending] = {}
        """what waits for a decision, by fragment"""
        self._changed = asyncio.Event()
        """set when something is offered or decided"""
        self._leaderships: dict[tuple[int, int, int], Leadership] = {}
        self._leads = Leads(ctx.me)
        self._tasks: set[asyncio.Task[None]] = set()
        self._catching_up: asyncio.Task[None] | None = None
        self._stats = RoundsStatistics()
        ctx.replica.listeners.append(self._settle)

    def statistics(self) -> RoundsStatistics:
        """How the rounds are."""
        self._stats.position = self._ctx.replica.position
        return self._stats

    def serve(self) -> None:
        """Answer the others from now on."""
        transport, fault = self._ctx.transport, self._ctx.fault
        transport.serve("head", self._serve_head)
        for method in ("prepare", "propose"):
            transport.serve(method, self._serve_vote(method))
        transport.serve("commit", guarded_call(self._serve_commit, fault))
        transport.serve_stream("round", guarded_stream(self._serve_round, fault))
        transport.serve_stream("reduce", guarded_stream(self._serve_reduce, fault))
        self._archive.serve()

    def offer(self, window: OfferedWindow) -> None:
        """Offer a contribution; it stays offered until a position of its fragment settles it."""
        self._pending[window.fragment] = Pending(window=window, since=self._ctx.now())
        self._changed.set()

    def withdraw(self) -> None:
        """Forget what was offered: the state that it belongs to is gone."""
        self._pending.clear()

    async def run(self) -> None:
        """Take part in position after position."""
        while True:
            position = self._ctx.replica.position
            if self._pending_at(position) is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            attempts = asyncio.create_task(self._attempts(position))
            decided = asyncio.create_task(self._ctx.replica.passed(position))
            try:
                await asyncio.wait({attempts, decided}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._end(attempts, decided)
            if attempts.done() and not attempts.cancelled() and attempts.exception():
                raise attempts.exception() or AssertionError

    def _pending_at(self, position: int) -> Pending | None:
        return self._pending.get(self._ctx.replay.fragment_at(position))

    async def close(self) -> None:
        """End everything that is under way."""
        for leadership in self._leaderships.values():
            await leadership.close()
        tasks = [*self._tasks, *([self._catching_up] if self._catching_up else [])]
        await self._end(*tasks)

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # taking part

    async def _attempts(self, position: int) -> None:
        ctx = self._ctx
        attempt = self.voter.promised
        while ctx.replica.position == position and self._pending_at(position) is not None:
            electorate = ctx.replica.electorate
            if not electorate:
                await asyncio.sleep(ctx.alive_s)
                continue
            leader = leader_of(electorate, position, attempt).peer_id
            try:
                await self._attempt(leader, position, attempt)
            except Refused as error:
                if not await self._refused(error, leader, position):
                    attempt = max(attempt + 1, self.voter.promised)
            except (AttemptFailed, TransportError) as error:
                self._stats.attempts_failed += 1
                ctx.on_event("warning", f"round {position + 1}, attempt {attempt}: {error}")
                attempt = max(attempt + 1, self.voter.promised)
                self.kick_catch_up()
                if attempt % len(electorate) == 0:
                    await asyncio.sleep(ctx.settings.stall_s)

    async def _attempt(self, leader: str, position: int, attempt: int) -> None:
        pending = self._pending_at(position)
        if pending is None:
            return
        ready = self._ready(pending, position, attempt)
        self._phase("wait")

        def on_exchange(exchange: Exchange) -> None:
            pending.exchange = exchange
            leading = self._leaderships.get((self._ctx.replica.epoch, position, attempt))
            if leading is not None:
                leading.exchange = exchange
                exchange.on_part = leading.changed.set
            self._phase("reduce")

        stream = await self._line_to(leader, position, attempt)
        try:
            await join(self._ctx, stream, ready, pending.window.offer.frames, on_exchange)
        finally:
            if pending.exchange is not None:
                await pending.exchange.close()

    async def _line_to(self, leader: str, position: int, attempt: int) -> Stream:
        if leader != self._ctx.me.peer_id:
            connect_s = CONNECT_STALLS * self._ctx.settings.stall_s
            return await self._ctx.transport.open(leader, "round", timeout_s=connect_s)
        here, there = stream_pair(self._ctx.me.peer_id, "round")
        self._spawn(self._serve_round_quietly(there))
        return here

    async def _serve_round_quietly(self, stream: LocalStream) -> None:
        try:
            await self._serve_round(self._ctx.me.peer_id, stream)
        except Refused as error:
            stream.refuse(error)
        except TransportError:
            pass
        finally:
            await stream.close()

    def _ready(self, pending: Pending, position: int, attempt: int) -> Ready:
        window = pending.window
        return Ready(
            protocol=PROTOCOL,
            epoch=self._ctx.replica.epoch,
            position=position,
            attempt=attempt,
            stands_at=self._ctx.replica.position,
            chain=self._ctx.replica.chain,
            incarnation=self._ctx.me.incarnation,
            weight=window.offer.weight,
            tokens=window.tokens,
            steps=window.steps,
            loss=window.loss,
            norm=window.offer.norm,
            uplink_mbit_s=self._ctx.link.uplink_mbit_s,
        )

    async def _refused(self, error: Refused, leader: str, position: int) -> bool:
        """Whether to wait for the decision rather than to go to the next leader."""
        if error.code in ("closed", "barred"):
            self._phase("late")
            self._ctx.on_event("info", f"round {position + 1}: {error.message}")
            with suppress(TimeoutError):
                async with asyncio.timeout(20 * self._ctx.settings.stall_s):
                    await self._ctx.replica.passed(position)
                return True
            return False
        if error.code == "decided":
            await self._catch_up_with(leader)
            return self._ctx.replica.position > position
        self._ctx.on_event("warning", f"round {position + 1}: {short(leader)} refused: {error}")
        return False

    def _phase(self, phase: str) -> None:
        if phase != self._stats.phase:
            self._stats.phase = phase
            self._on_phase(phase, self._ctx.replica.position)

    # leading

    def _lead(self, position: int, attempt: int) -> Leadership:
        """The leadership of an attempt of ours; it starts with the first call."""
        replica = self._ctx.replica
        place = Place(replica.epoch, position)
        key = (replica.epoch, position, attempt)
        if key not in self._leaderships:
            leadership = Leadership(
                ctx=self._ctx,
                voter=self.voter,
                place=place,
                electorate=tuple(replica.electorate),
                proposer=self._leads.begin(place, attempt, replica.electorate),
            )
            self._leaderships[key] = leadership
            self._spawn(self._run_leadership(key, leadership))
        return self._leaderships[key]

    async def _run_leadership(self, key: tuple[int, int, int], leadership: Leadership) -> None:
        try:
            outcome = await self._unless_passed(key[1], leadership.run())
            if outcome is None:
                return
            body = await self.voter.gather(outcome.entry, self._ctx.me.peer_id)
            announced = self._spawn(self._announce(leadership, outcome.entry, outcome.certificate))
            await self._commit(outcome.entry, outcome.certificate, body)
            self._on_led(outcome.entry, outcome.certificate, body)
            await announced
        except (AttemptFailed, TransportError, ValueError) as error:
            self._ctx.on_event(
                "warning", f"round {key[1] + 1}, attempt {key[2]} led here failed: {error}"
            )
        finally:
            await leadership.close()
            self._leaderships.pop(key, None)

    async def _unless_passed(self, position: int, work: Coroutine[None, None, T]) -> T | None:
        """What ``work`` gives, None if the position is decided before."""
        working = asyncio.create_task(work)
        passed = asyncio.create_task(self._ctx.replica.passed(position))
        try:
            await asyncio.wait({working, passed}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, passed):
                task.cancel()
            await asyncio.gather(working, passed, return_exceptions=True)

    async def _announce(
        self, leadership: Leadership, entry: Entry, certificate: Certificate
    ) -> None:
        decided = Decided(entry=entry.encode(), certificate=certificate.encode()).encode()
        peers = set(leadership.sessions) | set(self._ctx.seen)
        peers |= {elector.peer_id for elector in entry.electorate}
        peers.discard(self._ctx.me.peer_id)
        await asyncio.gather(*(self._tell(peer, decided) for peer in sorted(peers)))

    async def _tell(self, peer: str, decided: bytes) -> None:
        with suppress(TransportError):
            timeout_s = 4 * self._ctx.settings.stall_s
            await self._ctx.transport.call(peer, "commit", decided, timeout_s=timeout_s)

    async def _commit(self, entry: Entry, certificate: Certificate, body: bytes) -> None:
        update_N = await self.voter.update(entry)
        await self._ctx.replica.append(entry, certificate, body, update_N)

    # what a decided entry means for this peer

    def _settle(self, applied: Applied) -> None:
        entry = applied.entry
        pending = self._pending.pop(entry.fragment, None)
        included = entry.included_cells(self._ctx.me.peer_id, self._ctx.me.incarnation)
        self._stats.rounds += 1
        number = pending.window.number if pending is not None else None
        settled = Settled(applied=applied, included=included, settles=number)
        if pending is not None:
            self._stats.included += included is not None
            self._stats.left_out += included is None
            self._tell_left_out(entry, included)
            settled.credits = self._credits(entry, pending.exchange)
            settled.trace = self._trace(applied, pending)
            self._stats.last = settled.trace
        self._changed.set()
        self._phase("train")
        self._on_settled(settled)

    def _credits(self, entry: Entry, exchange: Exchange | None) -> list[tuple[slice, Tensor]]:
        """What this peer's encoding lost of the parts that the entry names as its own."""
        if exchange is None:
            return []
        mine = []
        for index, part in enumerate(entry.parts):
            done = exchange.parts.get(index)
            credit_N = exchange.credits.get(index)
            if credit_N is not None and done is not None and done.digest == part.digest:
                mine.append((exchange.range_of(index).values, credit_N))
        return mine

    def _trace(self, applied: Applied, pending: Pending) -> RoundTrace:
        now = self._ctx.now()
        trace = round_trace(applied, pending.exchange, since=pending.since, now=now)
        entry = applied.entry
        for (epoch, position, _), leadership in self._leaderships.items():
            if (epoch, position) == (entry.epoch, entry.position):
                trace.left_out = leadership.left_out | trace.left_out
        return trace

    def _tell_left_out(self, entry: Entry, included: list[bool] | None) -> None:
        """Who is left out is told so, and that it loses nothing."""
        if entry.kind == "update" and not (included and all(included)):
            counted = sum(included) if included else 0
            self._ctx.on_event(
                "warning",
                f"round {entry.position + 1}: {counted} of {entry.num_cells} cells of "
                "this peer count; the rest stays in its next contribution",
            )

    # answering

    async def _serve_head(self, remote: str, body: bytes) -> bytes:
        return self.head().encode()

    def head(self) -> Head:
        """Where this peer stands."""
        replica = self._ctx.replica
        ready_in_s = self._ctx.ready_in_s()
        return Head(
            protocol=PROTOCOL,
            epoch=replica.epoch,
            position=replica.position,
            chain=replica.chain or bytes(32),
            incarnation=self._ctx.me.incarnation,
            role="trainer" if ready_in_s is not None else "follower",
            ready_in_s=ready_in_s or 0.0,
            first_body=replica.store.first_with_bodies(),
            snapshots=tuple(sorted(replica.snapshots)),
            epoch_record=replica.epoch_record,
        )

    def _serve_vote(self, method: str) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def answer(remote: str, body: bytes) -> bytes:
            return await self.voter.answer(remote, method, body)

        return answer

    async def _serve_commit(self, remote: str, body: bytes) -> bytes:
        decided = Decided.decode(body)
        entry = Entry.decode(decided.entry)
        position = self._ctx.replica.position
        if entry.position < position:
            return b""
        if entry.position > position or entry.epoch != self._ctx.replica.epoch:
            self.kick_catch_up()
            return b""
        certificate = Certificate.decode(decided.certificate)
        check_certificate(entry, certificate, self._ctx.replica.electorate, self._ctx.verify)
        try:
            parts = await self.voter.gather(entry, remote)
        except (TransportError, MalformedRecord):
            self.kick_catch_up()
            return b""
        await self._commit(entry, certificate, parts)
        return b""

    def kick_catch_up(self) -> None:
        """Look for what is missing, if nobody is looking already."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = self._spawn(self._catch_up())

    async def _catch_up_with(self, leader: str) -> None:
        self.kick_catch_up()
        if self._catching_up is not None:
            await asyncio.wait({self._catching_up})

    async def _serve_round(self, remote: str, stream: Stream) -> None:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != READY:
            raise Refused("bad-ready", "expected a Ready record first")
        ready = Ready.decode(message[1:])
        await self._check_ready(remote, ready)
        place = Place(ready.epoch, ready.position)
        self._leads.check(place, ready.attempt, self._ctx.replica.electorate)
        if ready.attempt < self.voter.promised:
            raise Refused("superseded", f"attempt {self.voter.promised} is under way")
        await self._lead(ready.position, ready.attempt).serve(remote, ready, stream)

    async def _check_ready(self, remote: str, ready: Ready) -> None:
        barred = self._ctx.conduct.barred(remote, self._ctx.now())
        if barred is not None:
            raise Refused("barred", str(barred))
        if ready.protocol != PROTOCOL:
            raise Refused("protocol", f"expected protocol {PROTOCOL}, got {ready.protocol}")
        due = work_weight(ready.tokens, ready.steps, self._ctx.replay.method.weights)
        if ready.weight not in (0.0, due):
            self._ctx.fault(remote, "bad-weight")
            raise Refused(
                "bad-weight",
                f"expected a weight of 0 or {due:g} for {ready.tokens} tokens in {ready.steps} "
                f"steps, got {ready.weight:g}",
            )
        replica = self._ctx.replica
        for _ in range(CATCH_UP_TRIES):
            if replica.ready and replica.position >= ready.position and replica.electorate:
                break
            self.kick_catch_up()
            await asyncio.sleep(self._ctx.settings.stall_s / CATCH_UP_TRIES / 2)
        here = (replica.epoch, replica.position, replica.chain)
        if here == (ready.epoch, ready.position, ready.chain):
            return
        code = "decided" if replica.position > ready.position else "elsewhere"
        raise Refused(
            code,
            f"expected (epoch, position) {here[:2]}, got {(ready.epoch, ready.position)}; "
            "fetch what is missing",
        )

    async def _serve_reduce(self, remote: str, stream: Stream) -> None:
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != REDUCE:
            raise Refused("bad-head", "expected a Reduce record first")
        head = Reduce.decode(message[1:])
        exchange = await self._await_exchange(head)
        await exchange.serve(remote, head, stream)

    async def _await_exchange(self, head: Reduce) -> Exchange:
        """The exchange that a stream belongs to; the group may reach us after the stream does."""
        deadline = self._ctx.now() + CONNECT_STALLS * self._ctx.settings.stall_s
        while self._ctx.now() < deadline:
            pending = self._pending_at(head.position)
            exchange = pending.exchange if pending is not None else None
            if exchange is not None and exchange.digest == head.group:
                return exchange
            await asyncio.sleep(self._ctx.alive_s / 4)
        raise Refused("no-such-round", f"this group of round {head.position + 1} is not here")
