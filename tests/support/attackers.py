"""The attackers of `tests/attacks` that strike a swarm; `scripts/bench attacks` measures them."""

import asyncio
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import (
    Certificate,
    Vote,
    is_quorum,
    proposal_payload,
    sha256,
    vote_payload,
)
from atoll.peer.rounds.allreduce import sides
from atoll.peer.rounds.allreduce.reduction import PartReducer
from atoll.peer.rounds.allreduce.sides import Owner
from atoll.peer.rounds.consensus import leader as leaders
from atoll.peer.rounds.consensus import member
from atoll.peer.rounds.consensus.ballots import TERM, leader_of
from atoll.peer.rounds.consensus.polls import Polls
from atoll.peer.rounds.consensus.round_events import (
    ElectorsProbed,
    LeaderAbsent,
    Promised,
    SendProposal,
)
from atoll.peer.rounds.messages import (
    ALIVE,
    Announced,
    Ballot,
    Prefix,
    Prepare,
    Propose,
    deflated,
)
from atoll.peer.rounds.pacing import Link
from support.swarm import ready_of

LAST = (1 << 61) - 1
"""the last term that a message can name"""


def deny_others(monkeypatch, liar):
    """P1: as an owner, its reports name all other members of the group with 0 cells."""

    def lie(done, state):
        others = [i for i in range(len(state.group.members)) if i != state.me]
        partial = tuple(Prefix(member=i, cells=0) for i in others)
        return done.model_copy(update={"partial": partial})

    report(monkeypatch, liar, lie)


def report(monkeypatch, liar, lie):
    """As an owner, it reports `lie(done, state)` instead of `done`."""
    init = Owner.__init__

    class Lies(asyncio.Queue):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def put_nowait(self, done):
            super().put_nowait(lie(done, self.state))

    def lying(owner, state, *args, **options):
        init(owner, state, *args, **options)
        if state.ctx.me == liar:
            owner.reports = Lies(state)

    monkeypatch.setattr(Owner, "__init__", lying)


def finish_no_parts(monkeypatch, liar):
    """P5: as an owner, it takes all chunks, sends keepalives, and finishes nothing."""
    reduce = Owner.reduce

    async def never(owner, part, generation):
        if owner._state.ctx.me == liar:
            await asyncio.Event().wait()
        await reduce(owner, part, generation)

    monkeypatch.setattr(Owner, "reduce", never)


def never_report(monkeypatch, liar):
    """P17: its contribution is ready, as it answers, and it reports to no leader."""
    join = member.Flight._join

    async def silent(flight, leader, term):
        if flight._ctx.me == liar:
            await asyncio.Event().wait()
        await join(flight, leader, term)

    monkeypatch.setattr(member.Flight, "_join", silent)


async def tease(swarm):
    """P17: an admitted key answers that it is ready now whenever asked, and never reports."""
    key = swarm.add(role="keeper")  # follows the log, and trains nothing
    await key.start()
    key.role = "trainer"
    record = (await key.roster.peers())[key.identity.peer_id]
    await key.roster.publish(replace(record, role="trainer"), ttl_s=3600.0)
    return key


def close_alone(monkeypatch, liar):
    form = leaders.form_group

    def alone(ctx, place, term, ready):
        mine = {ctx.me.peer_id: ready[ctx.me.peer_id]} if ctx.me.peer_id in ready else ready
        return form(ctx, place, term, mine if ctx.me == liar else ready)

    monkeypatch.setattr(leaders, "form_group", alone)


def prolong(monkeypatch, liar, **times):
    """P3: as a leader, it gives its groups other times than the run has."""
    form = leaders.form_group

    def longer(ctx, place, term, ready):
        group = form(ctx, place, term, ready)
        return group.model_copy(update=times) if ctx.me == liar else group

    monkeypatch.setattr(leaders, "form_group", longer)


def leave_out(monkeypatch, liar, victims):
    """P19: as a leader, it closes its groups without some members, whose sessions go on."""
    form = leaders.form_group

    def without(ctx, place, term, ready):
        others = {peer: one for peer, one in ready.items() if peer not in victims}
        return form(ctx, place, term, others if ctx.me == liar and others else ready)

    monkeypatch.setattr(leaders, "form_group", without)


def drop(monkeypatch, liar, count):
    """The liar takes so many electors for dead, sessions or not."""
    init = leaders.Round.__init__

    def lying(machine, *args, leads, **options):
        init(machine, *args, leads=leads, **options)
        if leads._me == liar:
            is_live = machine.is_live
            machine.is_live = lambda peer: peer not in machine._silent and is_live(peer)

    async def note(leadership, heads):
        others = [e.peer_id for e in leadership._electorate() if e != liar]
        silent = others[:count] if leadership.ctx.me == liar else []
        leadership._take(ElectorsProbed(silent=frozenset(silent)))

    monkeypatch.setattr(leaders.Round, "__init__", lying)
    monkeypatch.setattr(leaders.Leadership, "_note_electors", note)


def stop_at(monkeypatch, liar, step):
    """The liar's terms hang at one step; its sessions go on."""
    init = leaders.Round.__init__

    def silent(machine, *args, leads, **options):
        init(machine, *args, leads=leads, **options)
        if leads._me == liar:
            setattr(machine, step, lambda view: [])

    monkeypatch.setattr(leaders.Round, "__init__", silent)


def equivocate(monkeypatch, liar):
    """At its next attempt the liar proposes twice, and commits what it gets a quorum for."""
    run, told = Polls._run, []

    async def lying(polls, question, electorate):
        me = polls._ctx.me
        if me != liar or not isinstance(question, SendProposal) or told:
            return await run(polls, question, electorate)
        told.append(question.entry.position)
        a = question.entry
        # Members signed what they brought; which generation a part is of is the leader's word.
        lie = a.parts[0].model_copy(update={"generation": a.parts[0].generation + 1})
        b = a.model_copy(update={"parts": (lie, *a.parts[1:])})
        others = [i for i, e in enumerate(electorate) if e != me]
        half = len(others) // 2
        certified = []
        for entry, side in ((a, others[:half]), (b, others[half:])):
            votes = {electorate.index(me): polls._ctx.sign(vote_payload(entry, question.attempt))}
            ask = Propose(
                attempt=question.attempt,
                entry=deflated(entry.encode()),
                reports=polls._reports.get(entry.reports, ()),
                signature=polls._ctx.sign(proposal_payload(entry, question.attempt)),
            )
            for i in side:
                try:
                    answer = await polls._ctx.transport.call(
                        electorate[i].peer_id, "propose", ask.encode(), timeout_s=5
                    )
                except TransportError:
                    continue
                votes[i] = Ballot.decode(answer).signature
            if is_quorum(list(votes), len(electorate)):
                ballots = tuple(Vote(elector=i, signature=s) for i, s in sorted(votes.items()))
                certificate = Certificate(attempt=question.attempt, votes=ballots)
                certified.append((entry, certificate, side))
        for entry, certificate, side in certified:
            commit = Announced(
                entry=deflated(entry.encode()), certificate=certificate.encode(), tell=()
            )
            for i in side:
                try:
                    await polls._ctx.transport.call(
                        electorate[i].peer_id, "commit", commit.encode(), timeout_s=5
                    )
                except TransportError:
                    continue

    monkeypatch.setattr(Polls, "_run", lying)
    return told


def falsify(monkeypatch, liar, changes):
    """P7: groups that the liar closes give their last member numbers that it did not report."""
    form = leaders.form_group

    def lying(ctx, place, term, ready):
        group = form(ctx, place, term, ready)
        if ctx.me != liar:
            return group
        last = group.members[-1].model_copy(update=changes)
        return group.model_copy(update={"members": (*group.members[:-1], last)})

    monkeypatch.setattr(leaders, "form_group", lying)


async def call_far_terms(stranger, identity, peers, refused):
    """P13: report to all peers, again and again, for the last term that each of them leads."""
    while True:
        for peer in peers:
            replica = peer.replica
            term = next(
                t
                for t in range(LAST, 0, -1)
                if leader_of(replica.electorate, replica.position, t) == peer.ctx.me
            )
            try:
                stream = await stranger.open(peer.identity.peer_id, "round", timeout_s=2)
                await stream.send(ready_of(identity, peer, term=term), timeout_s=2)
                await stream.recv(timeout_s=5)
            except Refused as error:
                refused[str(error.code)] += 1
        await asyncio.sleep(0.1)


def hold(monkeypatch, liar):
    """P5: the liar sends signs of life instead of its codes."""
    send_frames, begin = sides.Sender._send_frames, member.begin_upfront

    async def silent(sender, stream, frames, first):
        ctx = sender._state.ctx
        if ctx.me != liar:
            return await send_frames(sender, stream, frames, first)
        while True:
            await stream.send(ALIVE, timeout_s=ctx.settings.stall_s)
            await asyncio.sleep(ctx.alive_s)

    def begin_unless(ctx, *args):
        return None if ctx.me == liar else begin(ctx, *args)

    monkeypatch.setattr(sides.Sender, "_send_frames", silent)
    monkeypatch.setattr(member, "begin_upfront", begin_unless)


def declare_no_uplink(monkeypatch, liar_link):
    """P5: the liar declares an uplink of 0, so that the others would wait for ever."""
    known = Link.uplink_mbit_s.fget
    rate = property(lambda link: 0.0 if link == liar_link else known(link))
    monkeypatch.setattr(Link, "uplink_mbit_s", rate)


def spoil_parts(monkeypatch, liar):
    """P9: as an owner, it reports bytes that decode to nothing."""
    make, put_together = Owner.make_part, PartReducer._put_together
    spoilt = weakref.WeakSet()

    def making(owner, part, generation, senders):
        made = make(owner, part, generation, senders)
        if owner._state.ctx.me == liar:
            spoilt.add(made.reducer)
        return made

    def lying(reduction, part, generation):
        body, done = put_together(reduction, part, generation)
        if reduction in spoilt:
            body = bytes(255 for _ in body)
            done = done.model_copy(update={"digest": sha256(body)})
        return body, done

    monkeypatch.setattr(Owner, "make_part", making)
    monkeypatch.setattr(PartReducer, "_put_together", lying)


async def preempt(liar, keepers, every_s=0.05):
    """P13: it asks the others for promises of its next term, as soon as they have an earlier one.

    A promise that it gets ends the term of an honest leader; it proposes nothing.
    """
    others = [keeper for keeper in keepers if keeper is not liar]
    while True:
        replica = others[0].replica
        here = max(keeper.rounds.voter.term for keeper in others)
        later = range(here + 1, here + 1 + len(replica.electorate))
        own = (
            t for t in later if leader_of(replica.electorate, replica.position, t) == liar.ctx.me
        )
        attempt = next(own) * TERM
        ask = Prepare(epoch=replica.epoch, position=replica.position, attempt=attempt).encode()
        names = [keeper.identity.peer_id for keeper in others]
        calls = (liar.ctx.transport.call(name, "prepare", ask, timeout_s=2) for name in names)
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(every_s)


async def strike(swarm, liar, honest):
    """P18: it ends each term without a group by one promise, of the leader that it strikes.

    The term that it has promised is the liar's next one.
    """
    struck, ctx = set(), liar.ctx
    while True:
        await asyncio.sleep(0.05)
        here = ctx.replica.epoch, ctx.replica.position
        for peer in honest:
            for (epoch, position, term), one in list(peer.rounds.leading._leaderships.items()):
                is_new = (peer, epoch, position, term) not in struck
                if (epoch, position) != here or one.round.group is not None or not is_new:
                    continue
                struck.add((peer, epoch, position, term))
                first = max(term, peer.rounds.voter.term) + 1
                electorate = ctx.replica.electorate
                terms = range(first, first + len(electorate))
                own = next(t for t in terms if leader_of(electorate, position, t) == ctx.me)
                ask = Prepare(epoch=epoch, position=position, attempt=own * TERM).encode()
                with suppress(TransportError):
                    await ctx.transport.call(peer.identity.peer_id, "prepare", ask, timeout_s=1.0)


def usurp(monkeypatch, liar, *, asks=True):
    """P18: it ends each term that comes before its own, and decides its own work alone.

    It reports to itself alone, waits for nobody's call, and asks for promises at once; or, without
    asking, proposes as if it had them.
    """
    await_absence, ask = leaders.Leadership._await_absence, leaders.Leadership._ask_trainers

    def others(position):
        electorate = liar.replica.electorate
        led = (leader_of(electorate, position, term) for term in range(len(electorate)))
        return list(takewhile(lambda leader: leader != liar.ctx.me, led))

    async def at_once(leadership):
        if leadership.ctx is not liar.ctx:
            return await await_absence(leadership)
        leadership._take(LeaderAbsent())

    async def nobody(leadership):
        return {} if leadership.ctx is liar.ctx else await ask(leadership)

    ask_promise = leaders.Polls._ask_promise

    async def make_up(polls, question, index, *args):
        if polls._ctx is not liar.ctx or asks:
            return await ask_promise(polls, question, index, *args)
        polls._take(Promised(attempt=question.attempt, elector=index, accepted=None))

    monkeypatch.setattr(leaders.Polls, "_ask_promise", make_up)
    monkeypatch.setattr(liar.ctx, "skipped_terms", lambda position: range(len(others(position))))
    monkeypatch.setattr(leaders.Leadership, "_await_absence", at_once)
    monkeypatch.setattr(leaders.Leadership, "_ask_trainers", nobody)


def evict(patch, peers, liar):
    """The organiser puts a peer out, as the others hear with their next heartbeats."""
    name = liar.identity.peer_id

    def check(remote, _, use=""):
        if remote == name:
            raise Refused(RefusalCode.NOT_ADMITTED, "the organiser has evicted this peer")

    for peer in peers:
        patch.setattr(peer.transport.handlers, "check", check)
        patch.setattr(peer.ctx.conduct, "_is_evicted", lambda peer_id: peer_id == name)


def stay(patch, liar, honest):
    """C4: an evicted elector says that it stands where the others do, and leads in silence."""
    head = liar.rounds.head

    def at_head(known):
        replica = honest.replica
        place = {"epoch": replica.epoch, "position": replica.position, "chain": replica.chain}
        return head(known).model_copy(update=place)

    async def lead(remote, stream):
        async def live():
            while True:
                await stream.send(ALIVE, timeout_s=2)
                await asyncio.sleep(0.3)

        async def read():
            while await stream.recv(timeout_s=60) is not None:
                pass

        with suppress(TransportError, BaseExceptionGroup):
            async with asyncio.TaskGroup() as both:
                both.create_task(live())
                both.create_task(read())

    patch.setattr(liar.rounds, "head", at_head)
    patch.setitem(liar.transport.handlers._streams, "round", lead)
