"""An elector votes for nothing that breaks a rule of the log: a lying leader is refused by name."""

from dataclasses import replace

import pytest
import torch

from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import PeerUnreachable, Refused
from atoll.optim.log.entry import Entry, Member, Part, StateRoot, proposal_payload, sha256
from atoll.optim.reduction.cells import body_of
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.consensus.leader import Leadership
from atoll.peer.rounds.messages import Propose, Sworn, deflated
from support.swarm import run_swarm


def longer(entry):
    last = entry.parts[-1].model_copy(update={"wire_bytes": entry.parts[-1].wire_bytes + (1 << 30)})
    return {"parts": (*entry.parts[:-1], last)}


LIES = {
    "next electorate": (lambda e: {"electorate": e.electorate[:1]}, "bad-electorate"),
    "learning rate": (lambda e: {"lr": 0.25}, "bad-scalars"),
    "momentum": (lambda e: {"momentum": 0.25}, "bad-scalars"),
    "state root": (
        lambda e: {"state_root": StateRoot(position=e.position - 2, root=b"x" * 32)},
        "bad-root",
    ),
    "position of the root": (
        lambda e: {"state_root": StateRoot(position=e.position - 1, root=e.state_root.root)},
        "bad-root",
    ),
    "fragment": (lambda e: {"fragment": 1}, "bad-proposal"),
    "length of a part": (longer, "bad-proposal"),
}


@pytest.mark.parametrize(
    "lie",
    [
        "learning rate",
        "state root",
        "next electorate",
        "length of a part",
        "position of the root",
        "fragment",
        pytest.param("momentum", marks=pytest.mark.exhaustive),  # beside the learning rate
    ],
)
def test_a_lying_leader_is_refused_and_the_next_one_decides(tmp_path, monkeypatch, lie):
    change, code = LIES[lie]
    honest = Leadership._entry

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        at = 4  # carries a root
        await swarm.until(lambda: all(p.replica.position >= 3 for p in peers))
        liar = leader_of(peers[0].replica.electorate, at, 0)

        def entry_of(self, *args):
            entry = honest(self, *args)
            lies = self.ctx.me == liar and self.place.position == at and entry.kind == "update"
            return entry.model_copy(update=change(entry)) if lies else entry

        monkeypatch.setattr(Leadership, "_entry", entry_of)
        await swarm.until(lambda: all(p.replica.position >= at + 2 for p in peers))
        reported = [e for p in peers if p.ctx.me == liar for e in p.events]
        assert any(code in text for text in reported), reported
        entry = Entry.decode(peers[0].replica.store.get(at).entry)
        assert (entry.lr, entry.momentum, entry.fragment) == (0.5, 0.5, 0)
        assert len(entry.electorate) == 3
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)


# One voter, at a position at which nothing was proposed yet


def update_of(swarm, peers, body):
    """An update of all peers at position 0, with a body of one part."""
    replica = peers[0].replica
    members = tuple(
        Member(
            peer_id=p.ctx.me.peer_id,
            incarnation=p.ctx.me.incarnation,
            weight=1.0,
            clip=1.0,
            norm=1.0,
            tokens=1,
            steps=1,
            loss=None,
        )
        for p in peers
    )
    part = Part(
        start_cell=0,
        stop_cell=len(swarm.replay.cells_at(0)),
        owner=0,
        generation=0,
        wire_bytes=len(body),
        digest=sha256(body),
    )
    return Entry(
        run_id=replica.run_id,
        epoch=replica.epoch,
        position=0,
        kind="update",
        previous_chain=replica.chain,
        fragment=0,
        lr=0.5,
        momentum=0.5,
        members=members,
        parts=(part,),
        electorate=replica.electorate,
        norms=(1.0,),
    )


def good_body(swarm):
    cells = swarm.replay.cells_at(0)
    return body_of(cells.encode(torch.ones(cells.numel)))


def alone(tmp_path, vote):
    """Call `vote(swarm, peers, leader, voter)` before any window ends."""

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1000.0)
        first = leader_of(peers[0].replica.electorate, 0, 0)
        leader = next(p for p in peers if p.ctx.me == first)
        voter = next(p for p in peers if p is not leader)
        voter.rounds.voter._check_reports = checked
        assert voter.rounds.voter.term == 0  # it stands at the position: parts that come stay
        await vote(swarm, peers, leader.identity.peer_id, voter)

    run_swarm(tmp_path, scenario)


async def checked(entry, reports):
    """What members signed is checked elsewhere."""


def proposed(entry, peers, leader, **sent):
    sign = next(p for p in peers if p.identity.peer_id == leader).identity.sign
    signature = sign(proposal_payload(entry, 0))
    record = deflated(entry.encode())
    return Propose(attempt=0, entry=record, signature=signature, **sent).encode()


def test_a_body_that_does_not_decode_gets_no_vote(tmp_path):
    async def vote(swarm, peers, leader, voter):
        blamed = []
        voter.ctx.fault = lambda peer, why: blamed.append(peer)
        for body, decodes in ((b"noise", False), (good_body(swarm), True)):
            entry = update_of(swarm, peers, body)
            voter.ctx.parts.put(0, sha256(body), body)
            ask = proposed(entry, peers, leader)
            if decodes:
                assert await voter.rounds.voter.answer(leader, "propose", ask)
                continue
            with pytest.raises(PeerUnreachable, match="decodes"):
                await voter.rounds.voter.answer(leader, "propose", ask)
        assert not blamed  # the owner lied

    alone(tmp_path, vote)


def test_a_follower_gathers_a_body_and_decodes_nothing(tmp_path):
    """Values of all parts take as much as the parameters, and its ledger decodes as it applies."""

    async def vote(swarm, peers, leader, voter):
        body = good_body(swarm)
        entry = update_of(swarm, peers, body)
        (part,) = entry.parts
        source = next(p for p in peers if p.identity.peer_id == leader)
        source.ctx.parts.put(0, part.digest, body)  # fetched at first, in hand then
        for is_ledger in (True, True, False):
            voter.replica.is_ledger = is_ledger
            assert await voter.rounds.voter.gather(entry, leader) == body
            values = voter.ctx.parts.decoded(0, part.digest, (part.start_cell, part.stop_cell))
            assert (values is None) == is_ledger
            assert (await voter.rounds.voter.update(entry) is None) == is_ledger

    alone(tmp_path, vote)


def test_a_proposal_that_its_leader_did_not_sign_gets_no_vote(tmp_path):
    async def vote(swarm, peers, leader, voter):
        body = good_body(swarm)
        voter.ctx.parts.put(0, sha256(body), body)
        entry = update_of(swarm, peers, body)
        forged = proposed(entry, peers, voter.identity.peer_id)
        with pytest.raises(Refused, match="leader signed") as refusal:
            await voter.rounds.voter.answer(leader, "propose", forged)
        assert refusal.value.code is RefusalCode.BAD_PROPOSAL

    alone(tmp_path, vote)


def test_reports_that_the_entry_does_not_name_get_no_vote(tmp_path):
    async def vote(swarm, peers, leader, voter):
        body = good_body(swarm)
        voter.ctx.parts.put(0, sha256(body), body)
        others = (Sworn(counts=True, uplink_mbit_s=1.0, signature=b""),)
        proposal = proposed(update_of(swarm, peers, body), peers, leader, reports=others)
        with pytest.raises(Refused, match="reports that it names") as refusal:
            await voter.rounds.voter.answer(leader, "propose", proposal)
        assert refusal.value.code is RefusalCode.BAD_PROPOSAL

    alone(tmp_path, vote)


def test_no_vote_for_a_position_that_was_decided_while_the_body_came(tmp_path):
    async def vote(swarm, peers, leader, voter):
        body, replica = good_body(swarm), voter.replica
        entry = update_of(swarm, peers, body)

        async def gather(entry, source):
            head = replace(replica.head, position=1, chain=entry.chain)
            replica.standing = replace(replica.standing, head=head)
            return body

        voter.rounds.voter.gather = gather
        with pytest.raises(Refused) as refusal:
            await voter.rounds.voter.answer(leader, "propose", proposed(entry, peers, leader))
        assert refusal.value.code is RefusalCode.ELSEWHERE

    alone(tmp_path, vote)


def test_parts_of_an_older_epoch_are_dropped(tmp_path):
    async def vote(swarm, peers, leader, voter):
        replica, held = voter.replica, voter.ctx.parts
        held.put(replica.position, sha256(b"part"), b"part")
        head = replace(replica.head, epoch=replica.epoch + 1)
        replica.standing = replace(replica.standing, head=head)
        assert voter.rounds.voter.term == 0
        assert held.body(sha256(b"part")) is None

    alone(tmp_path, vote)
