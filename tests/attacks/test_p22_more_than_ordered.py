"""P22: with an order that the organiser gave, a leader does something that nobody ordered."""

import asyncio
from collections.abc import Callable

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused
from atoll.optim.log.electorate import TRIAL_ENTRIES
from atoll.optim.log.entry import Entry, Epoch, Newcomer, SignedEpoch, epoch_payload
from atoll.optim.log.orders import (
    EvictPeer,
    Order,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RotateKey,
    RunSettings,
    SetInnerSteps,
    StopRun,
    sign_order,
)
from atoll.peer.rounds.consensus.leader import Leadership
from support.orders import entries, expect_without, give, id_of, is_decided, leader_at, take
from support.swarm import ORGANISER, RUN_ID, SMALL, Swarm, SwarmPeer, order_of, reached, run_swarm

NEW = RunKeys.generate()
Tamper = Callable[[Entry, SwarmPeer], Entry]


def run(folder, scenario):
    return run_swarm(folder, scenario, layout=SMALL)


def lets_lead(monkeypatch, liar: SwarmPeer, tamper: Tamper) -> list[Entry]:
    """Let a leader change what it proposes for an order; returns what it made."""
    honest, made = Leadership._entry, []

    def entry(self, kind, *arguments, **named):
        found = honest(self, kind, *arguments, **named)
        if self.ctx is not liar.ctx or kind != "control":
            return found
        made.append(tamper(found, liar))
        return made[-1]

    monkeypatch.setattr(Leadership, "_entry", entry)
    return made


def changed(**fields: object) -> Tamper:
    return lambda entry, liar: entry.model_copy(update=fields)


def puts_another_out(entry: Entry, liar: SwarmPeer) -> Entry:
    others = [e for e in entry.electorate if e != liar.ctx.me]
    return entry.model_copy(
        update={"electorate": tuple(e for e in entry.electorate if e != others[0])}
    )


def keeps_the_evicted(entry: Entry, liar: SwarmPeer) -> Entry:
    return entry.model_copy(update={"electorate": liar.replica.electorate})


def lets_a_friend_vote_soon(entry: Entry, liar: SwarmPeer) -> Entry:
    friend = Newcomer(peer_id="friend", since=0, last=entry.position, entries=TRIAL_ENTRIES)
    return entry.model_copy(update={"newcomers": (*entry.newcomers, friend)})


def brings_a_later_order(entry: Entry, liar: SwarmPeer) -> Entry:
    settings = liar.replica.settings
    settings = settings.model_copy(update={"number": settings.number + 2, "inner_steps": 9})
    order = order_of(settings.number, SetInnerSteps(value=9))
    return entry.model_copy(update={"order": order, "settings": settings.stored})


def sets_more(entry: Entry, liar: SwarmPeer) -> Entry:
    settings = RunSettings.decode(entry.settings).model_copy(update={"inner_steps": 9})
    return entry.model_copy(update={"settings": settings.stored})


def more(tamper: Tamper, name: str) -> object:
    """A variant of a test that runs always."""
    return pytest.param(tamper, id=name, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(brings_a_later_order, id="a later order"),
        pytest.param(sets_more, id="more settings"),
        more(keeps_the_evicted, "evicted in"),
        more(puts_another_out, "another out"),
        more(lets_a_friend_vote_soon, "a friend"),
        more(changed(lr=0.25), "lr"),
        more(changed(norms=(1e-3,)), "norms"),
    ],
)
def test_a_leader_of_an_order_changes_nothing_else(tmp_path, monkeypatch, tamper):
    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, PauseRun())
        await swarm.until(is_decided(peers, 1))
        position = peers[0].replica.position
        liar = leader_at(swarm, position)
        honest = [peer for peer in peers if peer is not liar]
        out = honest[-1]
        made = lets_lead(monkeypatch, liar, tamper)
        before = peers[0].replica.electorate
        give([peer for peer in peers if peer is not out], 2, EvictPeer(peer_id=id_of(out)))
        await swarm.until(is_decided(honest, 2))
        assert made, "the liar has led"
        entry = entries(honest[0])[position]
        assert entry not in made
        assert entry.electorate == tuple(e for e in before if e != out.ctx.me)
        assert honest[0].replica.settings == RunSettings(
            number=2, is_paused=True, evicted=(id_of(out),)
        )
        give(peers, 3, ResumeRun())
        await swarm.until(lambda: reached(honest[:-1], position + 4))
        expect_without(honest, out, position)
        assert swarm.same_bits(honest[:-1])

    run(tmp_path, scenario)


def test_a_readmitted_peer_is_no_acceptor_by_its_leaders_word(tmp_path, monkeypatch):
    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        friend, honest = peers[3], peers[:3]
        give(honest, 1, EvictPeer(peer_id=id_of(friend)))
        await swarm.until(is_decided(honest, 1))
        give(honest, 2, PauseRun())
        await swarm.until(is_decided(honest, 2))
        position = honest[0].replica.position
        liar = leader_at(swarm, position)
        made = lets_lead(
            monkeypatch,
            liar,
            lambda entry, liar: entry.model_copy(
                update={"electorate": (*entry.electorate, friend.ctx.me)}
            ),
        )
        give(honest, 3, ReadmitPeer(peer_id=id_of(friend)))
        await swarm.until(is_decided(honest, 3))
        assert made and entries(honest[0])[position] not in made
        assert friend.ctx.me not in honest[0].replica.electorate

    run(tmp_path, scenario)


def test_a_run_that_has_stopped_is_not_revived_by_a_leader(tmp_path, monkeypatch):
    """The organiser signed a resume too late; who has it cannot bring it into the log."""

    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, StopRun())
        await swarm.until(is_decided(peers, 1))
        last = peers[0].replica.position
        liar, resume = leader_at(swarm, last), order_of(2, ResumeRun())
        made = lets_lead(monkeypatch, liar, lambda entry, liar: entry)
        monkeypatch.setattr(liar.ctx, "next_order", lambda: resume)
        liar.rounds.ordering._came.set()
        give([peer for peer in peers if peer is not liar], 2, ResumeRun())
        await swarm.until(lambda: made)
        await asyncio.sleep(30.0)
        assert {peer.replica.position for peer in peers} == {last}
        assert {peer.replica.settings.number for peer in peers} == {1}

    run(tmp_path, scenario)


def test_orders_of_the_future_fill_no_memory_and_stop_no_order(tmp_path):
    """They might be of a key that the log will name, so they are no fault; nothing is kept."""

    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 1))
        stranger, victim = Identity.ephemeral(), peers[1]
        for number in range(3, 203):
            order = Order(run_id=RUN_ID, number=number, change=StopRun())
            forged = sign_order(order, stranger.sign)
            await peers[0].transport.call(id_of(victim), "order", forged, timeout_s=1.0)
        assert victim.ctx.orders._orders == {}
        give(peers, 1, SetInnerSteps(value=7))
        await swarm.until(is_decided(peers, 1))
        assert {peer.replica.settings for peer in peers} == {RunSettings(number=1, inner_steps=7)}

    run(tmp_path, scenario)


def test_an_evicted_peer_may_read_the_log_and_nothing_else(tmp_path):
    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 2))
        out, others = peers[3], peers[:3]
        give(others, 1, EvictPeer(peer_id=id_of(out)))
        await swarm.until(is_decided(others, 1))
        readmits_itself = order_of(2, ReadmitPeer(peer_id=id_of(out)))
        for method in ("order", "prepare", "propose", "voted", "evidence", "commit", "group"):
            with pytest.raises(Refused) as refused:
                await out.transport.call(id_of(others[0]), method, readmits_itself, timeout_s=1.0)
            assert refused.value.code == RefusalCode.BARRED, method
        assert others[0].ctx.next_order() is None
        await swarm.until(is_decided([out], 1))  # it reads why

    run(tmp_path, scenario)


def test_the_runs_key_takes_no_organisers_place_by_an_epoch(tmp_path):
    """After a rotation the coordinator's key opens epochs; the settings in them change nothing."""

    async def scenario(swarm: Swarm) -> None:
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        give(peers, 1, RotateKey(value=NEW.run_public_key))
        await swarm.until(is_decided(peers, 1))
        for peer in peers:
            peer.window_s = 1e4  # nothing is decided meanwhile
        await asyncio.sleep(10.0)
        head = peers[0].replica.head
        assert {peer.replica.head for peer in peers} == {head}
        theirs = RunSettings(number=5, is_paused=True, evicted=(id_of(peers[2]),))
        epoch = Epoch(
            run_id=RUN_ID,
            epoch=2,
            base_position=head.position,
            base_chain=head.chain,
            electorate=peers[0].replica.electorate,
            norms=peers[0].replica.voters.norms,
            settings=theirs.stored,
        ).encode()
        record = SignedEpoch(epoch=epoch, signature=ORGANISER.sign(epoch_payload(epoch))).encode()
        for peer in peers:
            assert await peer.replica.adopt(record)
            assert peer.replica.settings == RunSettings(number=1, key=NEW.run_public_key)
        with pytest.raises(Refused):  # nor does that key give an order
            await peers[0].transport.call(
                id_of(peers[1]), "order", order_of(2, StopRun()), timeout_s=1.0
            )
        order = Order(run_id=RUN_ID, number=2, change=SetInnerSteps(value=7))
        take(peers, sign_order(order, NEW.sign))
        await swarm.until(is_decided(peers, 2))
        joiner = swarm.add()
        await joiner.start()
        assert joiner.replica.settings == peers[0].replica.settings
        assert joiner.replica.settings.inner_steps == 7

    run(tmp_path, scenario)
