"""Attackers that use up what others have: memory, the loop's time, slots, a joiner's patience."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import msgpack

from atoll.dht.identity import Identity
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import MAX_MEMBERS, Certificate, Entry, Vote, sha256
from atoll.optim.reduction.contribution import work_weight
from atoll.peer.rounds.allreduce.eager import furthest_upfront
from atoll.peer.rounds.allreduce.exchange import expected_plan, most_bytes
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.messages import (
    PIECE_BYTES,
    UPFRONT,
    Announced,
    Decided,
    PartRequest,
    Propose,
    Span,
    Upfront,
    deflated,
    tagged,
)
from atoll.peer.rounds.slots import MAX_SLOTS
from support.swarm import identity_of, ready_of

BODY = bytes(64 * PIECE_BYTES)
TRICKLE_S = 5.9  # between two messages: a donor waits 6 s for each
FAR = 10**6  # positions ahead: no round asks for them

# P6: members without work


async def report_and_live(stream, message):
    """P6: report, then send signs of life and read, and nothing else."""

    async def live():
        while True:
            await asyncio.sleep(0.3)
            await stream.send(b"", timeout_s=2.0)

    async def read():
        while await stream.recv(timeout_s=60.0) is not None:
            pass

    try:
        await stream.send(message, timeout_s=2.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(live())
            group.create_task(read())
    except* TransportError:
        pass


async def crowd(swarm, peers, count, seen):
    """P6: so many keys report a weight of 0 to the leader of each position, and then go away."""
    keys = [Identity.ephemeral() for _ in range(count)]
    transports = [swarm.network.transport(key.peer_id) for key in keys]
    replica = peers[0].replica
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                leader = leader_of(replica.electorate, replica.position, 0).peer_id
                for key, transport in zip(keys, transports, strict=True):
                    incarnation = sha256(key.peer_id.encode()).hex()[:32]
                    report = ready_of(key, peers[0], incarnation=incarnation)
                    with suppress(TransportError):
                        stream = await transport.open(leader, "round", timeout_s=2.0)
                        group.create_task(report_and_live(stream, report))
                        seen["report"] += 1
                await replica.passed(replica.position)
    finally:
        for key in keys:
            swarm.network.kill(key.peer_id)


# P8: a member that is greedy within every bound at once


def work_more(monkeypatch, liar, tokens=16, steps=4, norm=8.0):
    """P8: the liar claims so many times its tokens and steps, and sends so many times its norm."""
    offer, train = liar.rounds.offer, liar.train

    def greedy(window):
        more = {"tokens": tokens * window.tokens, "steps": steps * window.steps}
        rule = liar.swarm.replay.method.weights
        weight = work_weight(more["tokens"], more["steps"], rule)
        offer(replace(window, offer=replace(window.offer, weight=weight), **more))

    def exaggerate():
        liar.drift_N.zero_()  # what was counted was more than it had: keep to the factor
        return norm * train()

    monkeypatch.setattr(liar.rounds, "offer", greedy)
    monkeypatch.setattr(liar, "train", exaggerate)


def shrink(monkeypatch, liar):
    """P15: what the liar sends, and declares, is next to nothing."""
    train = liar.train

    def tiny():
        for feedback in liar.feedbacks:
            feedback.reset()
        liar.drift_N.zero_()
        return 1e-30 * train()

    monkeypatch.setattr(liar, "train", tiny)


# P9, P10: donors


def serve_instead(monkeypatch, liar, method, handler):
    """Serve streams of a method in a peer's stead, as long as their readers stay."""

    async def serve(remote, stream):
        with suppress(TransportError):
            await handler(remote, stream)

    monkeypatch.setitem(liar.transport.handlers._streams, method, serve)


def forged(peer, number):
    """Return an entry that looks right and has no certificate that holds."""
    row = peer.replica.store.get(peer.replica.position - 1)
    entry = Entry.decode(row.entry).model_copy(update={"position": number})
    return Decided(entry=entry.encode(), certificate=row.certificate).encode()


def forge_headers(monkeypatch, liar, *, large=False):
    """P9: send forged entries for as long as anybody takes them; return [entries, bytes] sent."""
    sent = [0, 0]

    async def headers(remote, stream):
        span = Span.decode(await stream.recv(timeout_s=5))
        for number in range(span.start, span.stop):
            data = Decided(entry=bytes(1_000_000), certificate=b"x").encode() if large else b""
            data = data or forged(liar, number)
            await stream.send(data, timeout_s=20)
            sent[0], sent[1] = sent[0] + 1, sent[1] + len(data)

    serve_instead(monkeypatch, liar, "headers", headers)
    return sent


def trickle(monkeypatch, liar, what):
    """P10: send one message every few seconds: what it holds, so that each is right by itself."""

    async def headers(remote, stream):
        span = Span.decode(await stream.recv(timeout_s=5))
        for position in range(span.start, span.stop):
            row = liar.replica.store.get(min(position, liar.replica.position - 1))
            decided = Decided(entry=row.entry, certificate=row.certificate)
            await stream.send(decided.encode(), timeout_s=20)
            await asyncio.sleep(5)

    async def leaves(remote, stream):
        await stream.recv(timeout_s=5)
        for _ in range(10_000):
            await stream.send(b"", timeout_s=20)
            await asyncio.sleep(5)

    async def body(remote, stream):
        await stream.recv(timeout_s=5)
        for _ in range(10_000):
            await stream.send(b"x", timeout_s=20)
            await asyncio.sleep(5)

    handlers = {"headers": headers, "digests": leaves, "leaves": leaves, "body": body}
    serve_instead(monkeypatch, liar, what, handlers[what])


async def join_s(swarm, limit_s=600.0, **options):
    """Let a newcomer join; return it and the seconds that it took."""
    newcomer = swarm.add(**options)
    began_s = swarm.now()
    task = asyncio.create_task(newcomer.start())
    await swarm.until(
        lambda: newcomer.replica.ready and bool(newcomer.replica.electorate), timeout_s=limit_s
    )
    await task
    return newcomer, swarm.now() - began_s


# P11: costly entries

MEMBER = {
    "incarnation": "0",
    "weight": 0.0,
    "clip": 0.0,
    "norm": 0.0,
    "tokens": 0,
    "steps": 0,
    "loss": None,
}


def costly(replica, *, position=0, members=MAX_MEMBERS, **changes):
    """P11: return the bytes of an entry that is right in its head and has thousands of members."""
    part = {"start_cell": 0, "stop_cell": 1, "owner": 0, "generation": 0, "wire_bytes": 0}
    fields = {
        "version": 5,
        "run_id": replica.run_id,
        "epoch": replica.epoch,
        "position": position,
        "kind": "update",
        "previous_chain": replica.chain,
        "fragment": 0,
        "lr": 0.5,
        "momentum": 0.5,
        "members": [{"peer_id": f"{index:x}"} | MEMBER for index in range(members)],
        "parts": [part | {"digest": bytes(32), "partial": []}],
        "reports": bytes(32),
        "electorate": [elector.model_dump() for elector in replica.electorate],
        "newcomers": [],
        "norms": [],
        "state_root": None,
    }
    return msgpack.packb(fields | changes)


async def send_costly(sender, victims, seen):
    """P11: propose and announce costly entries to all, here and far away, again and again."""
    votes = tuple(Vote(elector=index, signature=bytes(64)) for index in range(3))
    certificate = Certificate(attempt=0, votes=votes).encode()
    while True:
        replica = victims[0].replica
        for position in (replica.position, replica.position + FAR):
            entry = deflated(costly(replica, position=position))
            for method, record in (
                ("propose", Propose(attempt=0, entry=entry, signature=bytes(64))),
                ("commit", Announced(entry=entry, certificate=certificate, tell=())),
            ):
                for victim in victims:
                    await _ask(sender, victim, method, record.encode(), seen)
        await asyncio.sleep(0.5)


async def _ask(sender, victim, method, message, seen):
    try:
        await sender.call(victim.identity.peer_id, method, message, timeout_s=5)
        seen["taken"] += 1
    except Refused as error:
        seen[str(error.code)] += 1
    except TransportError:
        seen["no answer"] += 1


# P12: parts up front


async def begin_part(sender, owner, position=None, part=0):
    """P12: open a stream for one of the owner's parts; return it, and the most it may bring."""
    position = owner.replica.position if position is None else position
    plan = expected_plan(sender.ctx, position)
    mine = [i for i, p in enumerate(plan.parts) if p.owner == owner.identity.peer_id]
    head = Upfront(position=position, plan=plan.digest, part=mine[part], norm=1.0)
    stream = await sender.transport.open(owner.identity.peer_id, "reduce", timeout_s=5)
    await stream.send(tagged(UPFRONT, head), timeout_s=5)
    return stream, most_bytes(owner.ctx.replay.cells_at(position), plan.parts[mine[part]])


async def fill(stream, num_bytes, message=1 << 14):
    """P12: send until everything has left, or nobody takes it."""
    try:
        while num_bytes > 0:
            await stream.send(bytes(min(message, num_bytes)), timeout_s=5)
            num_bytes -= message
    except TransportError:
        pass


async def hoard(sender, owners, seen, streams=20):
    """P12: leave parts with all owners, of the next positions and of far ones, all the time."""

    async def leave(owner, position):
        try:
            stream, limit = await begin_part(sender, owner, position)
            await fill(stream, limit - 1)
            while await stream.recv(timeout_s=20) is not None:
                pass
        except Refused as error:
            seen[str(error.code)] += 1
        except (TransportError, IndexError):  # the owner has no part of that position
            seen["no part"] += 1

    async with asyncio.TaskGroup() as group:
        while True:
            for owner in owners:
                near = range(owner.replica.position, furthest_upfront(owner.ctx) + 1)
                for position in [*near, owner.replica.position + FAR]:
                    for _ in range(streams // 4):
                        group.create_task(leave(owner, position))
            await asyncio.sleep(2.0)


# P13: a lone caller


async def call_alone(swarm, peers, ahead=40, every_s=2.0, seen=None):
    """P13: call the leaders of later terms, again and again, by a key that nobody knows."""
    liar, seen = identity_of(99), Counter() if seen is None else seen
    stranger = swarm.network.transport(liar.peer_id)

    async def call(leader, term):
        try:
            stream = await stranger.open(leader.identity.peer_id, "round", timeout_s=2)
            await stream.send(ready_of(liar, leader, term=term), timeout_s=2)
            seen["call taken"] += 1
            while await stream.recv(timeout_s=30.0) is not None:
                pass
        except Refused as error:
            seen[str(error.code)] += 1
        except TransportError:
            seen["ended"] += 1

    async def attack(leader):
        replica = leader.replica
        async with asyncio.TaskGroup() as calls:
            while True:
                begin = leader.rounds.voter.term + ahead
                order = replica.electorate, replica.position
                near = range(begin, begin + 2 * len(peers))
                term = next(t for t in near if leader_of(*order, t) == leader.ctx.me)
                calls.create_task(call(leader, term))
                await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as group:
        for leader in peers:
            group.create_task(attack(leader))


# P14: slots of bulk reads


async def open_part(transport, donor):
    """Ask a donor for `BODY`."""
    stream = await transport.open(donor.identity.peer_id, "part", timeout_s=5)
    await stream.send(PartRequest(digest=sha256(BODY), wire_bytes=len(BODY)).encode(), timeout_s=5)
    return stream


async def read_slowly(transport, donor):
    """P14: read as slowly as is let pass, and begin anew once that is over."""
    while True:
        try:
            async with await open_part(transport, donor) as stream:
                while await stream.recv(timeout_s=600.0) is not None:
                    await asyncio.sleep(TRICKLE_S)
        except TransportError:
            await asyncio.sleep(0.01)


async def hog(transport, donors):
    """P14: hold all slots of all donors, each of which has `BODY`."""
    async with asyncio.TaskGroup() as group:
        for donor in donors:
            donor.ctx.parts.put(1 << 40, sha256(BODY), BODY)
            for _ in range(3 * MAX_SLOTS):
                group.create_task(read_slowly(transport, donor))
