"""A leader believes no more than it has checked, and waits for nobody without a limit."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks
from atoll.dht.testing.virtualtime import run_virtual
from atoll.dht.transport import Refused
from atoll.optim.log.entry import Certificate, Entry, Vote, sha256
from atoll.optim.log.orders import RunSettings
from atoll.peer.rounds.conduct import MAX_FAULTS, Fault
from atoll.peer.rounds.consensus.ballots import Leads, Place, leader_of
from atoll.peer.rounds.consensus.leader import LEAVE_STALLS, Leadership
from atoll.peer.rounds.consensus.leading import Leading
from atoll.peer.rounds.consensus.parts import Parts
from atoll.peer.rounds.consensus.round import RETURN_STALLS, Round, RoundState, Rules
from atoll.peer.rounds.consensus.round_events import (
    CloseGroup,
    Fail,
    FetchEnded,
    LeaderView,
    Left,
    PartReduced,
    Probed,
    RepairPart,
    Reported,
    SendProposal,
    TellGone,
    Unreachable,
)
from atoll.peer.rounds.messages import (
    Announced,
    Ballot,
    Group,
    PartDone,
    PartPlan,
    Prefix,
    deflated,
    tagged,
)
from support import round_model
from support.model import elector
from support.streams import send
from support.strikes import passed
from support.swarm import SETTINGS, run_swarm

PLACE = Place(1, 0)
ELECTORS = tuple(elector(index, 0) for index in range(2))
LONGEST = 10


class Cells:
    def max_body_bytes(self, members, start=0, stop=None):
        return LONGEST


def ready(peer, weight=1.0):
    honest = round_model._ready(0, 0)
    return honest.model_copy(update={"report": honest.report.model_copy(update={"weight": weight})})


def group_of(reports):
    members = tuple(
        round_model._member(peer).model_copy(update={"weight": report.report.weight})
        for peer, report in reports.items()
    )
    return Group(
        epoch=1,
        position=0,
        term=0,
        members=members,
        parts=(PartPlan(start_cell=0, stop_cell=2, owner=0),),
        stall_s=1.0,
        deadline_s=4.0,
    )


def view(now, **changes):
    fields = {"turn": True, "electorate": ELECTORS, "opened_at": 0.0, "last_s": 0.0}
    return LeaderView(now=now, **(fields | changes))


def begun(term=0):
    """A term, and the (kind, parts) of the entries that it makes."""
    made = []

    def entry(kind, members, parts, dropped):
        made.append((kind, parts))
        return Entry(
            run_id=b"r" * 32,
            epoch=1,
            position=0,
            kind=kind,
            previous_chain=b"c" * 32,
            fragment=0,
            lr=0.5,
            momentum=0.5,
            members=tuple(members),
            parts=tuple(parts),
            electorate=ELECTORS,
        )

    rules = Rules(form=group_of, entry=entry, cells=Cells(), grace_s=1.0)
    leads = Leads(leader_of(ELECTORS, 0, term))
    return Round(PLACE, term, leads=leads, rules=rules, view=view(0.0)), made


def closed(weights):
    """A term whose group has these members."""
    one, made = begun()
    for peer, weight in weights.items():
        one.receive(Reported(peer=peer, ready=ready(peer, weight)))
    one.receive(Probed(ready_at=dict.fromkeys(weights, 0.0)))
    assert any(isinstance(action, CloseGroup) for action in one.advance(view(0.0)))
    return one, made


def closes(one, **options):
    return any(isinstance(action, CloseGroup) for action in one.advance(view(0.0, **options)))


def test_two_that_are_ready_wait_for_nobody_that_lacks_several_entries():
    """One was ready when all were asked; each round waited for the next time."""
    one, _ = begun()
    at = dict.fromkeys(("p0", "p1", "p2"), 0.0)
    one.receive(Reported(peer="p0", ready=ready("p0")))
    one.receive(Probed(ready_at=at, behind=frozenset({"p2"})))
    assert not closes(one)
    one.receive(Reported(peer="p1", ready=ready("p1")))
    assert closes(one)


def test_trainers_that_lack_several_entries_are_no_part_of_a_quorum(monkeypatch):
    one, _ = begun()
    monkeypatch.setattr(one, "_rules", replace(one._rules, electors="keepers"))
    at = dict.fromkeys(("p0", "p1", "p2", "p3"), 0.0)
    one.receive(Reported(peer="p0", ready=ready("p0")))
    one.receive(Probed(ready_at=at, behind=frozenset({"p2", "p3"})))
    assert not one._has_quorum(view(0.0))
    one.receive(Reported(peer="p2", ready=ready("p2")))
    assert one._has_quorum(view(0.0)), "of three, as one of those that were behind is here"


def done(**changes):
    fields = {"part": 0, "generation": 0, "wire_bytes": LONGEST, "digest": sha256(b"part")}
    return PartDone(**(fields | {"partial": ()} | changes))


def test_a_reduction_that_never_ends_is_given_up_after_its_deadline():
    one, made = closed({"p0": 1.0, "p1": 1.0})
    assert not any(isinstance(a, SendProposal) for a in one.advance(view(0.0)))
    one.receive(PartReduced(peer="p0", done=done()))
    late = view(100.0, coming=frozenset())
    actions = one.advance(late)  # the bytes never came: neither held nor coming
    assert [a for a in actions if isinstance(a, SendProposal)]
    assert [kind for kind, _ in made] == ["null"]


def test_a_later_term_waits_until_it_is_called_for():
    one, _ = begun(term=1)
    assert one.state is RoundState.CALLED
    assert one.advance(view(0.5)) == []


@pytest.mark.parametrize("term", [0, 1])
def test_a_term_without_a_group_ends_for_a_later_one(term):
    """Its leader waited for a quorum as a leader, and was waited for as a member: half a minute."""
    one, _ = begun(term)
    assert one.advance(view(0.5, promised_term=term)) == []
    (fail,) = one.advance(view(0.5, promised_term=2))
    assert fail == Fail(why="term 2 is under way")


def test_a_term_with_a_group_goes_on_to_its_votes():
    one, _ = closed({"p0": 1.0, "p1": 1.0})
    assert not any(isinstance(a, Fail) for a in one.advance(view(0.5, promised_term=2)))


def test_a_report_after_the_group_was_closed_is_refused():
    one, _ = closed({"p0": 1.0})
    with pytest.raises(Refused) as refusal:
        one.receive(Reported(peer="p1", ready=ready("p1")))
    assert refusal.value.code is RefusalCode.CLOSED
    assert one.live == ["p0"]
    assert list(one.left_out) == ["p1"]


def test_a_member_that_reports_anew_is_there_again():
    one, _ = begun()
    for event in (
        Reported(peer="p0", ready=ready("p0")),
        Left(peer="p0"),
        Reported(peer="p0", ready=ready("p0")),
    ):
        one.receive(event)
    assert one.live == ["p0"]


def cut_off(one, peer="p1"):
    one.receive(Left(peer=peer, is_cut_off=True))
    return one.advance(view(0.0))


def test_a_member_that_a_relay_cut_off_returns_to_its_group():
    one, _ = closed({"p0": 1.0, "p1": 1.0})
    one.receive(Left(peer="p0"))
    assert any(isinstance(action, RepairPart) for action in cut_off(one))
    one.receive(Unreachable(peer="p1"))  # the order of the repair found no session
    assert one.live == ["p1"]
    (readmit,) = one.receive(Reported(peer="p1", ready=ready("p1")))
    assert (readmit.peer, readmit.gone) == ("p1", (0,))
    assert [(order.part, order.owner, order.senders) for order in readmit.orders] == [(0, 1, (1,))]
    assert not any(isinstance(action, TellGone) for action in one.advance(view(99.0)))
    assert one.live == ["p1"]


def test_a_member_that_does_not_return_is_gone_after_two_stalls():
    one, _ = closed({"p0": 1.0, "p1": 1.0})
    assert cut_off(one) == []
    assert one.advance(view(RETURN_STALLS * 1.0 - 0.1)) == []
    assert one.advance(view(RETURN_STALLS * 1.0)) == [TellGone(member=1)]
    with pytest.raises(Refused):
        one.receive(Reported(peer="p1", ready=ready("p1")))


def test_a_member_returns_once_and_with_the_same_report():
    """Each return has the leader send the group again, and waits for another."""
    one, _ = closed({"p0": 1.0, "p1": 1.0})
    cut_off(one)
    with pytest.raises(Refused):
        one.receive(Reported(peer="p1", ready=ready("p1", weight=2.0)))
    one.receive(Reported(peer="p1", ready=ready("p1")))
    with pytest.raises(Refused):
        one.receive(Reported(peer="p1", ready=ready("p1")))
    assert one.receive(Left(peer="p1", is_cut_off=True)) == [TellGone(member=1)]


LIES = {
    "of another's part": ("p1", {}),
    "too long": ("p0", {"wire_bytes": LONGEST + 1}),
    "a member that is not there": ("p0", {"partial": (Prefix(member=2, cells=1),)}),
    "a whole inclusion as partial": ("p0", {"partial": (Prefix(member=1, cells=2),)}),
    "a member named twice": ("p0", {"partial": (Prefix(member=1, cells=1),) * 2}),
    "of another generation": ("p0", {"generation": 1}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_report_on_a_part_that_cannot_be_logged_counts_for_nothing(lie):
    remote, changes = LIES[lie]
    parts = Parts(group_of({"p0": ready("p0"), "p1": ready("p1")}), Cells(), now=0.0)
    parts.note(remote, done(**changes))
    assert parts.digests == {}
    parts.note("p0", done(partial=(Prefix(member=1, cells=1),)))
    assert parts.digests == {0: sha256(b"part")}


def test_a_fetch_of_an_earlier_generation_does_not_end_the_next():
    parts = Parts(group_of({"p0": ready("p0"), "p1": ready("p1")}), Cells(), now=0.0)
    parts.note("p0", done())
    parts.fetched(FetchEnded(part=0, digest=sha256(b"earlier")))
    assert not parts.lost(view(0.0), lambda peer: True)
    parts.fetched(FetchEnded(part=0, digest=sha256(b"part")))
    assert parts.lost(view(0.0), lambda peer: True)


# In a swarm


def test_votes_that_somebody_else_signed_are_not_counted(tmp_path, monkeypatch):
    """Counted, they would make a certificate that no replica accepts."""
    honest = Ballot.encode
    monkeypatch.setattr(Ballot, "encode", lambda self: honest(Ballot(signature=b"x" * 64)))

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        await swarm.until(lambda: any("no vote from" in e for p in peers for e in p.events))
        events = [e for p in peers for e in p.events]
        assert any("invalid signature on the vote" in event for event in events)

    run_swarm(tmp_path, scenario)


class Decided:
    """A leadership whose position is decided; a member has not heard of it yet."""

    place, term, sessions = PLACE, 0, {}

    def __init__(self):
        self.calls = []

    async def run(self):
        return SimpleNamespace(entry="entry", certificate="certificate")

    async def until_left(self):
        self.calls.append("waited for its members")

    async def close(self):
        self.calls.append("closed their sessions")


def test_a_leader_closes_no_session_before_its_members_heard():
    """An end without a decision looks to a member like the leader's death."""

    async def nothing(*_):
        return None

    async def for_ever(*_):
        await asyncio.Event().wait()

    async def main():
        leading, led = Leading.__new__(Leading), Decided()
        leading._ctx = SimpleNamespace(me=ELECTORS[0])
        leading._voter = SimpleNamespace(gather=nothing)
        leading._tasks, leading._leaderships = Tasks(), {(1, 0, 0): led}
        leading._commit = leading._announce = nothing
        leading._await_end, leading._on_led = for_ever, lambda *_: None
        await leading._run((1, 0, 0), led)
        assert led.calls == ["waited for its members", "closed their sessions"]
        assert leading.at(PLACE, 0) is None
        await leading._tasks.close()

    run_virtual(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_members_are_waited_for_until_they_left_or_a_while(leaves):
    async def main():
        led = Leadership.__new__(Leadership)
        led.ctx = SimpleNamespace(
            now=asyncio.get_running_loop().time, settings=SETTINGS, alive_s=SETTINGS.stall_s / 4
        )
        led.changed, led.round = asyncio.Event(), SimpleNamespace(live=["p1"])
        if leaves:
            asyncio.get_running_loop().call_later(1.0, led.round.live.clear)
        started = led.ctx.now()
        await led.until_left()
        limit_s = 1.0 if leaves else LEAVE_STALLS * SETTINGS.stall_s
        assert led.ctx.now() - started == pytest.approx(limit_s, abs=led.ctx.alive_s)

    run_virtual(main())


def test_a_barred_member_is_refused(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1000.0)
        leader = leader_of(peers[0].replica.electorate, 0, 0)
        at, other = sorted(peers, key=lambda p: p.ctx.me != leader)[:2]
        for _ in range(MAX_FAULTS):
            at.ctx.fault(other.identity.peer_id, Fault.BAD_CELL)
        report = ready("p")
        refusal = await send(other.transport, at, "round", tagged(b"R", report))
        assert refusal is not None and refusal.code is RefusalCode.BARRED
        refusal = await send(other.transport, at, "round", tagged(b"X", report))
        assert refusal is not None and refusal.code is RefusalCode.BAD_READY

    run_swarm(tmp_path, scenario)


def test_a_report_that_its_sender_did_not_sign_is_refused(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1000.0)
        leader = leader_of(peers[0].replica.electorate, 0, 0)
        at, other = sorted(peers, key=lambda p: p.ctx.me != leader)[:2]
        refusal = await send(other.transport, at, "round", tagged(b"R", ready("p")))
        assert refusal is not None and refusal.code is RefusalCode.BAD_READY
        assert "signed" in refusal.message

    run_swarm(tmp_path, scenario)


def test_a_commit_with_forged_votes_moves_nobody_and_is_not_passed_on(tmp_path):
    async def scenario(swarm):
        peers = await swarm.start(3, window_s=20.0)
        await swarm.until(lambda: passed(peers, 1))
        victim = peers[0]
        replica, stranger = victim.replica, swarm.network.transport("stranger")
        last = Entry.decode(replica.store.get(replica.position - 1).entry)
        null = last.model_copy(
            update={
                "position": replica.position,
                "previous_chain": replica.chain,
                "kind": "null",
                "members": (),
                "parts": (),
                "state_root": None,
            }
        )
        votes = tuple(Vote(elector=i, signature=b"x" * 64) for i in range(3))
        body = Announced(
            entry=deflated(null.encode()),
            certificate=Certificate(attempt=0, votes=votes).encode(),
            tell=tuple(p.identity.peer_id for p in peers[1:]),
        ).encode()
        await asyncio.sleep(5.0)  # until the last decision was passed on
        before, asked = (replica.position, replica.chain), []
        swarm.network.on_message = lambda src, dst, method, n: asked.append((src, dst))
        with pytest.raises(Refused):
            await stranger.call(victim.identity.peer_id, "commit", body, timeout_s=5.0)
        assert (replica.position, replica.chain) == before
        told = {dst for src, dst in asked if src == victim.identity.peer_id}
        assert told <= {"stranger"}  # neither passed on, nor its parts looked for

    run_swarm(tmp_path, scenario)


def test_a_leader_looks_who_has_been_evicted(tmp_path):
    """The machine then gives up a group that it closed before the order."""

    async def scenario(swarm):
        first, second = await swarm.start(2, window_s=1000.0)
        leader = leader_of(first.replica.electorate, 0, 0)
        peer = first if first.ctx.me == leader else second
        place = Place(peer.replica.epoch, 0)
        leadership = peer.rounds.leading._lead("somebody", place, 0)
        assert leadership._view().evicted == frozenset()
        other = next(e.peer_id for e in peer.replica.electorate if e != leader)
        out = RunSettings(number=1, evicted=(other,))
        peer.replica.standing = replace(peer.replica.standing, settings=out.stored)
        assert leadership._view().evicted == {other}

    run_swarm(tmp_path, scenario)
