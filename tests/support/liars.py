"""A peer of a swarm that lies at random, in what it sends, what it answers and what it withholds.

The liar runs the code of an honest peer, so that it is a member and an elector and leads its terms.
Its transport passes most of its messages on. It changes, repeats, delays or swallows the others,
each receiver's for itself, so that its messages contradict each other. Between them it sends
messages that nobody asked for: old ones, changed ones, made-up ones and noise.

`Twister` chooses what a message becomes, from a seed, without sending anything. `Liar` sends.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack

from atoll.dht.transport import MAX_MESSAGE_BYTES, Refused, Stream, TransportError
from atoll.optim.log.entry import (
    LogError,
    NamedEntry,
    Record,
    Trust,
    commit_payload,
    proposal_payload,
    vote_payload,
)
from atoll.optim.log.locks import NO_DIGEST, Decree, promise_payload
from atoll.peer.rounds.consensus.ballots import TERM, leader_of
from atoll.peer.rounds.consensus.dissemination import group_payload
from atoll.peer.rounds.messages import (
    ALIVE,
    CELL,
    GONE,
    GROUP,
    MAX_GROUP_BYTES,
    PART_DONE,
    READY,
    REDUCE,
    REPAIR,
    SEATED,
    UPFRONT,
    AskCommit,
    Ballot,
    BodyRequest,
    Group,
    JustifiedPropose,
    Known,
    LeafRequest,
    LeavesRequest,
    LockedPromise,
    PartRequest,
    Prepare,
    Report,
    Span,
    Voted,
    deflated,
    inflated,
    report_payload,
)
from support.swarm import SwarmPeer, ready_of

CALLS = ("head", "prepare", "propose", "lock", "voted", "evidence", "commit", "group", "seals")
STREAMS = ("round", "reduce", "part", "headers", "body", "digests", "leaves")
KINDS = (READY, GROUP, SEATED, REPAIR, GONE, PART_DONE, CELL, REDUCE, UPFRONT, ALIVE)
FAR = (1 << 61) - 1
KEPT = 200  # messages that the liar remembers for later: those of some rounds
LARGE_BYTES = 1 << 19  # beyond what small records may have; two fit into a message
MAX_INFLATED_BYTES = 1 << 22
GAP_S = 0.7  # mean time between messages that nobody asked for: some in every phase of a round

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How a liar lies."""

    rate: float
    """of its messages that it changes or withholds"""
    contradicts: bool
    """whether it signs what contradicts its other signatures, and denies what it accepted"""
    doubles: bool
    """whether it votes for two entries at one ballot as well, which puts it out for good"""

    @classmethod
    def of(cls, rng: random.Random, trust: Trust) -> Habits:
        """Return habits from a seed.

        Crash faults are all that the default mode tolerates in votes: there an elector that
        contradicts itself may fork the log (docs/security.md). `test_p4_equivocate.py` has that.
        """
        contradicts = trust == "byzantine"
        return cls(
            rate=rng.choice((0.02, 0.1, 0.3)),
            contradicts=contradicts,
            doubles=contradicts and rng.random() < 0.5,
        )


@dataclass(kw_only=True)
class Twister:
    """What messages become. Bytes in, bytes out; only the seed decides."""

    rng: random.Random
    run_id: bytes
    sign: Sign
    contradicts: bool

    def twist(self, data: bytes) -> bytes:
        """Return a message with a lie in it: fields changed and signed again, or bytes damaged."""
        return self._twist(data)[:MAX_MESSAGE_BYTES]  # no transport sends more at once

    def _twist(self, data: bytes) -> bytes:
        if self.rng.random() < 0.2:
            return self.damage(data)
        kind = data[:1] if data[:1] in KINDS and data[:1] != ALIVE else b""
        fields = _fields(data[len(kind) :]) or _fields(data)
        if fields is None:
            return self.damage(data)
        kind = kind if _fields(data[len(kind) :]) else b""
        lie = self._changed(fields)
        if isinstance(lie, dict):
            with suppress(LogError, ValueError, TypeError, KeyError):
                self._sign(lie)
        try:
            return kind + msgpack.packb(lie, use_bin_type=True)
        except (ValueError, OverflowError):
            return self.damage(data)

    def damage(self, data: bytes) -> bytes:
        """Return bytes that are cut off, flipped, too long or noise."""
        rng = self.rng
        match rng.randrange(5):
            case 0:
                return data[: rng.randrange(len(data) + 1)]
            case 1 if data:
                at = rng.randrange(len(data))
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 2:
                return data + bytes(rng.choice((1, 100, LARGE_BYTES)))
            case 3:
                return rng.choice(KINDS) + data
        return rng.randbytes(rng.randrange(1, 300))

    def _changed(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            return value | {key: self._changed(value[key])}
        if isinstance(value, tuple | list) and value:
            at, items = rng.randrange(len(value)), list(value)
            match rng.randrange(6):
                case 0:
                    del items[at]
                case 1:
                    items.append(items[at])
                case 2:
                    items.reverse()
                case _:
                    items[at] = self._changed(items[at])
            return items
        if isinstance(value, bytes):
            return self._changed_bytes(value)
        return rng.choice(self._scalars(value))

    def _changed_bytes(self, value: bytes) -> bytes:
        """Look into what is packed or deflated, mostly, else no lie would reach an entry."""
        if len(value) > 64 and self.rng.random() < 0.8:
            with suppress(LogError):
                inner = inflated(value, MAX_INFLATED_BYTES)
                fields = _fields(inner)
                if fields is not None:
                    inner = msgpack.packb(self._changed(fields), use_bin_type=True)
                return deflated(inner if fields is not None else self.damage(inner))
            fields = _fields(value)
            if fields is not None:
                return msgpack.packb(self._changed(fields), use_bin_type=True)
        return self.damage(value)

    def _scalars(self, value: Any) -> list[Any]:
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, int):
            return [0, max(0, value - 1), value + 1, value + TERM, value + 1000, FAR, (1 << 64) - 1]
        if isinstance(value, float):
            return [0.0, value / 2, value * 2, 1e30, -1.0, math.inf, math.nan, 2.0**-120]
        if isinstance(value, str):
            return ["", value[:-1], value + "x", "x" * 5000]
        return [0, b"", "", 1.0]

    def _sign(self, lie: dict[str, Any]) -> None:
        """Sign a changed record as its kind is signed."""
        if "report" in lie and "signature" in lie:
            report = Report.decode(msgpack.packb(lie["report"], use_bin_type=True))
            lie["signature"] = self.sign(report_payload(self.run_id, report))
        if "group" in lie and "tell" in lie:
            group = Group.decode(inflated(lie["group"], MAX_GROUP_BYTES))
            lie["signature"] = self.sign(group_payload(self.run_id, group.digest))
        if self.contradicts and {"entry", "attempt", "signature"} <= set(lie):
            self._sign_ballot(lie)

    def _sign_ballot(self, lie: dict[str, Any]) -> None:
        if len(lie["entry"]) > 32:  # a proposal; a vote has the entry's digest
            entry = NamedEntry.of(inflated(lie["entry"], MAX_INFLATED_BYTES))
            lie["signature"] = self.sign(proposal_payload(entry, lie["attempt"]))


def _fields(data: bytes) -> dict[str, Any] | None:
    try:
        fields = msgpack.unpackb(data, raw=False, use_list=False)
    except Exception:  # msgpack has many
        return None
    return fields if isinstance(fields, dict) else None


class Liar:
    """Turns a peer of a swarm, before it starts, into a liar."""

    def __init__(self, peer: SwarmPeer, others: list[SwarmPeer], seed: int) -> None:
        """Take over the peer's transport; it lies from `begin` on."""
        self.peer, self.others = peer, others
        self.rng = random.Random(seed)
        swarm = peer.swarm
        self.habits = Habits.of(self.rng, swarm.module.trust)
        self.twister = Twister(
            rng=self.rng,
            run_id=swarm.module.run_id,
            sign=peer.identity.sign,
            contradicts=self.habits.contradicts,
        )
        self.lies = 0
        self.lying = False
        self._proposed: NamedEntry | None = None
        """the last proposal that it heard in full"""
        self._kept: list[tuple[str, bytes]] = []
        """(method, message) of what it sent and heard"""
        transport = self.transport = peer.transport
        self._call, self._open = transport.call, transport.open
        self._answer, self._run = transport.handlers.answer, transport.handlers.run
        for name, lying in (("call", self._lying_call), ("open", self._lying_open)):
            setattr(transport, name, lying)
        for name, lying in (("answer", self._lying_answer), ("run", self._lying_run)):
            setattr(transport.handlers, name, lying)
        # Handlers of the liar may fail by what it did to its own answers.
        setattr(transport.handlers, "_on_failure", lambda error: None)  # noqa: B010

    def begin(self) -> list[asyncio.Task[None]]:
        """Lie from now on; return the tasks that do."""
        self.lying = True
        return [asyncio.create_task(self._make_up())]

    # what it does to messages that an honest peer would send

    def _lies(self) -> bool:
        lies = self.lying and self.rng.random() < self.habits.rate
        self.lies += lies
        return lies

    def _keep(self, method: str, message: bytes) -> None:
        if len(self._kept) < KEPT:
            self._kept.append((method, message))
        else:
            self._kept[self.rng.randrange(KEPT)] = method, message

    async def _lying_call(self, peer: str, method: str, body: bytes, *, timeout_s: float) -> bytes:
        self._keep(method, body)
        if self._lies():
            match self.rng.randrange(4):
                case 0:
                    await asyncio.sleep(timeout_s)
                    raise TransportError(f"the liar swallowed a call of {method}", peer=peer)
                case 1:
                    await asyncio.sleep(self.rng.random() * timeout_s)
                case _:
                    body = self.twister.twist(body)
        return await self._call(peer, method, body, timeout_s=timeout_s)

    async def _lying_answer(self, remote: str, method: str, body: bytes) -> bytes:
        self._keep(method, body)
        lies = self._lies()
        if lies and self.habits.contradicts and self.rng.random() < 0.5:
            with suppress(LogError):
                if signed := self._unfounded(method, body):
                    return signed
        answer = await self._answer(remote, method, body)
        # To deny what it accepted is to contradict itself.
        honest = method == "prepare" and not self.habits.contradicts
        if honest or not lies:
            return answer
        match self.rng.randrange(4):
            case 0:
                raise Refused("not-now", "not now")
            case 1:
                await asyncio.sleep(self.rng.random() * 10.0)
                return answer
        return self.twister.twist(answer)

    def _unfounded(self, method: str, body: bytes) -> bytes | None:
        """Return a promise, a vote or a commit that it signs without looking or keeping anything.

        The promise denies each lock; the vote and the commit may be of a second entry.
        """
        sign, replica = self.peer.identity.sign, self.peer.replica
        if method == "prepare":
            asked = Prepare.decode(body)
            decree = Decree(replica.run_id, asked.epoch, asked.position, replica.chain)
            signature = sign(promise_payload(decree, asked.attempt, 0, NO_DIGEST))
            return LockedPromise(lock=None, entry=b"", signature=signature).encode()
        if method == "propose":
            proposal = JustifiedPropose.decode(body)
            if proposal.group:
                return None  # without the members nobody knows its digest
            self._proposed = NamedEntry.of(inflated(proposal.entry, MAX_INFLATED_BYTES))
            return Ballot(signature=sign(vote_payload(self._proposed, proposal.attempt))).encode()
        if method == "lock" and self._proposed is not None:
            lock = AskCommit.decode(body).lock
            return Ballot(signature=sign(commit_payload(self._proposed, lock.attempt))).encode()
        return None

    async def _lying_open(self, peer: str, method: str, *, timeout_s: float) -> Stream:
        return self._bend(await self._open(peer, method, timeout_s=timeout_s))

    async def _lying_run(self, stream: Stream) -> None:
        await self._run(self._bend(stream))

    def _bend(self, stream: Any) -> Stream:
        """Let a stream's sender lie."""
        send = stream.send

        async def lying(data: bytes, *, timeout_s: float) -> None:
            message = bytes(data)
            if len(message) < LARGE_BYTES:
                self._keep(stream.method, message)
            if not self._lies():
                return await send(data, timeout_s=timeout_s)
            match self.rng.randrange(5):
                case 0:
                    return
                case 1:
                    await send(data, timeout_s=timeout_s)
                case 2:
                    await asyncio.sleep(self.rng.random() * timeout_s)
                case _:
                    message = self.twister.twist(message)
            await send(message, timeout_s=timeout_s)

        stream.send = lying
        return stream

    # what it makes up

    async def _make_up(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.rng.expovariate(1 / GAP_S))
                if len(group._tasks) < 64:  # a liar's own memory is not the question
                    group.create_task(self._quietly(self._one()))

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        with suppress(TransportError, LogError):
            await work

    async def _one(self) -> None:
        self.lies += 1
        picked = self.others if self.rng.random() < 0.3 else [self.rng.choice(self.others)]
        choices: list[Callable[[SwarmPeer], Awaitable[None]]] = [
            self._replay,
            self._replay,
            self._prepare,
            self._report,
            self._read,
            self._noise,
        ]
        if self.habits.doubles:
            choices.append(self._vote)
        choice = self.rng.choice(choices)
        for peer in picked:
            await choice(peer)

    async def _replay(self, peer: SwarmPeer) -> None:
        if not self._kept:
            return
        method, message = self.rng.choice(self._kept)
        for _ in range(self.rng.choice((1, 1, 2, 10))):
            await self._send(peer, method, self._maybe(message))

    async def _prepare(self, peer: SwarmPeer) -> None:
        """Prepare a term that the liar leads, near or far; rarely, as that ends others' ballots."""
        replica, rng = self.peer.replica, self.rng
        electorate = replica.electorate
        near = [t for t in range(1, 40) if self._leads(replica.position, t)]
        if not near or not electorate:
            return
        term = rng.choice([near[0], near[0], rng.choice(near), rng.randrange(1 << 21)])
        ask = Prepare(
            epoch=replica.epoch,
            position=replica.position + rng.choice((0, 0, 0, 1, 100)),
            attempt=term * TERM + rng.randrange(TERM),
        )
        await self._send(peer, "prepare", self._maybe(ask.encode()))

    def _leads(self, position: int, term: int) -> bool:
        electorate = self.peer.replica.electorate
        return bool(electorate) and leader_of(electorate, position, term) == self.peer.ctx.me

    async def _vote(self, peer: SwarmPeer) -> None:
        """Vote for an entry that nobody proposed, at a ballot at which it may vote for another."""
        replica = self.peer.replica
        voted = NamedEntry(
            run_id=replica.run_id,
            epoch=replica.epoch,
            position=replica.position,
            previous_chain=replica.chain,
            digest=self.rng.randbytes(32),
        )
        attempt = self.rng.choice((0, 0, 1, TERM))
        signature = self.peer.identity.sign(vote_payload(voted, attempt))
        message = Voted(
            epoch=voted.epoch,
            position=voted.position,
            attempt=attempt,
            entry=voted.digest,
            signature=signature,
            proposal=signature,
        )
        await self._send(peer, "voted", message.encode())

    async def _report(self, peer: SwarmPeer) -> None:
        rng, replica = self.rng, self.peer.replica
        if not replica.ready or not peer.replica.ready:
            return
        changes = {
            "term": rng.choice((0, 0, 1, 2, 5, FAR)),
            "position": peer.replica.position + rng.choice((0, 0, 1, 2, 50)),
            "weight": rng.choice((0.0, 128.0, 1e30)),
            "tokens": rng.choice((0, 1280, FAR)),
            "steps": rng.choice((0, 10, FAR)),
            "norm": rng.choice((0.0, 1.0, 1e30)),
            "uplink_mbit_s": rng.choice((0.0, 100.0, 1e9)),
            "incarnation": rng.choice((self.peer.incarnation, "f" * 32)),
        }
        ready = ready_of(self.peer.identity, peer, **changes)
        await self._send(peer, "round", self._maybe(ready))

    async def _read(self, peer: SwarmPeer) -> None:
        rng = self.rng
        start = rng.choice((0, 0, max(0, self.peer.replica.position - 2), FAR))
        span = Span(start=start, stop=rng.choice((start + 1, start + 100, FAR + 1)))
        asks: dict[str, Record] = {
            "headers": span,
            "body": BodyRequest(
                position=start,
                start=rng.choice((0, 7, FAR)),
                stop=rng.choice((1, 100, FAR)),
                gives_way=rng.choice((False, True)),
            ),
            "digests": LeafRequest(position=start, start=0, stop=FAR),
            "leaves": LeavesRequest(
                position=start, start=0, stop=FAR, gives_way=rng.choice((False, True))
            ),
            "part": PartRequest(digest=rng.randbytes(32), wire_bytes=rng.choice((0, 100, FAR))),
            "head": Known(epoch=rng.choice((None, 0, 1, FAR)), roster=rng.randbytes(40)),
        }
        method = rng.choice(list(asks))
        await self._send(peer, method, self._maybe(asks[method].encode()))

    async def _noise(self, peer: SwarmPeer) -> None:
        method = self.rng.choice((*CALLS, *STREAMS))
        await self._send(peer, method, self.twister.damage(self.rng.randbytes(100)))

    def _maybe(self, message: bytes) -> bytes:
        return self.twister.twist(message) if self.rng.random() < 0.5 else message

    async def _send(self, peer: SwarmPeer, method: str, message: bytes) -> None:
        name = peer.identity.peer_id
        if method in CALLS:
            await self._call(name, method, message, timeout_s=10.0)
            return
        stream = await self._open(name, method, timeout_s=2.0)
        try:
            await stream.send(message, timeout_s=2.0)
            for _ in range(self.rng.randrange(6)):
                with suppress(TimeoutError, TransportError):
                    await stream.recv(timeout_s=self.rng.random() * 5.0)
                if self._kept:
                    await stream.send(self._maybe(self.rng.choice(self._kept)[1]), timeout_s=2.0)
        finally:
            await stream.close()
