"""Peers that go: the others wait for no contribution of theirs, and for votes some seconds."""

import asyncio
import shutil
from contextlib import suppress

import pytest

from atoll.coordinator import policies
from atoll.dht.tasks import end
from atoll.dht.testing.memory import run_virtual
from atoll.peer.daemon.log_run import LAST_VOTE_S
from atoll.peer.rounds.consensus.ballots import leader_of
from atoll.peer.rounds.messages import Decided, Known
from support.strikes import Strike, expect_no_work_lost, expect_sums, passed, settled_down
from support.swarm import SETTINGS, SMALL, Swarm, run_swarm, signed_epoch

TICK_S = 0.5
HEARTBEAT_S = 1.0
LONGER_THAN_A_ROUND = 150


def test_a_peer_that_dies_while_the_group_forms_costs_no_grace(tmp_path):
    async def main():
        swarm = Swarm(tmp_path)
        try:
            slow, *others = await swarm.start(4)
            await swarm.until(lambda: all(p.replica.position == 1 for p in swarm.peers))
            slow.window_s = 7.0  # the others wait for it, within their grace
            await swarm.until(lambda: all(p.replica.position == 2 for p in swarm.peers))
            began_s = swarm.now()
            leaving = next(p for p in others if p is not leader(swarm))
            await swarm.until(lambda: leaving.rounds.statistics().phase == "wait")
            leaving.kill()
            alive = [p for p in swarm.peers if p is not leaving]
            await swarm.until(lambda: all(p.replica.position == 3 for p in alive))
            assert swarm.now() - began_s < slow.window_s + SETTINGS.grace_s / 2
        finally:
            await swarm.stop()

    run_virtual(main())


def leader(swarm):
    at = swarm.peers[0].replica
    elector = leader_of(at.electorate, at.position, 0)
    return next(p for p in swarm.peers if p.ctx.me == elector)


class Office:
    """What a coordinator does about electors that leave, by the log of any peer.

    It may have followed as far as the slowest of those who stay, or as far as who left and handed
    over: from wherever it opens an epoch, it voids nothing.  It gives what only those had who left.
    """

    name = "coordinator"

    def __init__(self, swarm):
        self.swarm = swarm
        self.gone = {}
        self.left = []
        self.epochs = 1
        for peer in swarm.peers:
            peer.recovery._fallback = self

    @property
    def staying(self):
        return [p for p in self.swarm.peers if p not in self.left]

    async def leave(self, peer):
        """As `atoll.peer.daemon.peer` does; the log stays, as the coordinator has it."""
        self.left.append(peer)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_VOTE_S):
                await peer.rounds.retire()
        await end(*peer.tasks)
        if peer.rounds.retired:
            me, replica = peer.ctx.me, peer.replica
            self.gone[me.peer_id, me.incarnation] = replica.epoch, replica.position
        await peer.rounds.close()
        self.swarm.network.kill(peer.identity.peer_id)

    async def run(self):
        while True:
            await asyncio.sleep(TICK_S)
            for peer in self.swarm.peers:
                at = peer.replica
                if at.epoch == self.epochs and not policies.can_decide(
                    at.electorate, self.gone, (at.epoch, at.position)
                ):
                    await self.open(at.position, at.chain)
                    break

    async def open(self, position, chain):
        self.epochs += 1
        electors = [peer.ctx.me for peer in self.staying]
        record = signed_epoch(self.epochs, position, chain, electors)
        await asyncio.sleep(HEARTBEAT_S)
        for peer in self.staying:
            if not await peer.replica.adopt(record):
                peer.rounds.kick_catch_up()

    # a source of what is missing

    @property
    def log(self):
        return max(self.left, key=lambda peer: peer.replica.position).replica.store

    async def head(self):
        furthest = max(self.left, key=lambda peer: peer.replica.position)
        head = furthest.rounds.head(Known(epoch=None))
        return head.model_copy(update={"epoch": self.epochs})

    async def headers(self, start, stop):
        records = self.log.headers(start, stop - start)
        return [Decided(entry=r.entry, certificate=r.certificate) for r in records]

    async def body(self, position, start, into, *, gives_way=False):
        into[:] = self.log.body(position)[start : start + len(into)]

    def close(self):
        for peer in self.left:
            peer.replica.store.close()


class Departure(Strike):
    """At the n-th message from the start of a round some of the peers leave."""

    def __init__(self, swarm, message, leave):
        super().__init__(swarm, "leave", message)
        self._leave = leave

    def on_message(self, src, dst, method, n):
        if self.before is not None:
            self.before(src, dst, method, n)
        if n >= self.first + self.message and self.at_s is None:
            self.at_s = self.swarm.now()
            self.victims = self._leave(src, dst)


def run_departure(folder, peers, message, num_leaving):
    """Seconds until who stays has decided the round, and how many epochs that took."""

    async def scenario(swarm):
        await swarm.start(peers)
        office = Office(swarm)
        tasks = [asyncio.create_task(office.run())]

        def leave(src, dst):
            electors = [elector.peer_id for elector in swarm.peers[0].replica.electorate]
            going = [p for p in swarm.peers if p.identity.peer_id in electors[:num_leaving]]
            tasks.extend(asyncio.create_task(office.leave(peer)) for peer in going)
            return going

        await swarm.until(lambda: passed(swarm.peers, 0))
        strike = Departure(swarm, message, leave)
        strike.arm()
        await swarm.until(lambda: strike.at_s is not None)
        await swarm.until(lambda: len(office.gone) == num_leaving)
        at = max(peer.replica.position for peer in swarm.peers)
        await swarm.until(lambda: passed(office.staying, at))
        took_s = swarm.now() - strike.at_s
        await swarm.until(lambda: passed(office.staying, at + 2))
        await swarm.until(lambda: settled_down(office.staying))
        strike.disarm()
        await end(*tasks)
        office.close()
        assert swarm.same_bits(office.staying)
        for peer in office.staying:
            assert peer.resets == 0  # nothing that anybody held was voided
            expect_no_work_lost(peer)
        expect_sums(swarm, office.staying[0])
        return took_s, office.epochs

    result = run_swarm(folder, scenario, layout=SMALL)
    shutil.rmtree(folder)
    return result


@pytest.mark.parametrize(
    ("peers", "num_leaving", "message"),
    [(2, 1, 1), (2, 1, 85), (3, 2, 70), (4, 2, 60)],
)
def test_without_electors_that_left_the_others_decide_in_seconds(
    tmp_path, peers, num_leaving, message
):
    took_s, epochs = run_departure(tmp_path / "run", peers, message, num_leaving)
    assert took_s < LAST_VOTE_S
    assert epochs == 2


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("peers", "num_leaving"), [(2, 1), (3, 2)])
def test_electors_that_leave_at_any_message_void_nothing(tmp_path, peers, num_leaving):
    for message in range(1, LONGER_THAN_A_ROUND):
        took_s, _ = run_departure(tmp_path / str(message), peers, message, num_leaving)
        assert took_s < LAST_VOTE_S


def test_an_elector_with_an_open_vote_does_not_claim_to_have_none(tmp_path):
    async def scenario(swarm):
        one, two = await swarm.start(2)
        await swarm.until(lambda: passed(swarm.peers, 0))
        office = Office(swarm)
        two.kill()
        assert not one.rounds.retired
        booth = one.rounds.voter._booth
        voted_for = leader_of(one.replica.electorate, booth.here.position, 0).peer_id
        booth.accept(voted_for, booth.here, 0, b"what the other may have applied")
        began_s = swarm.now()
        await office.leave(one)
        assert swarm.now() - began_s >= LAST_VOTE_S
        assert office.gone == {}
        office.close()
        two.replica.store.close()

    run_swarm(tmp_path, scenario, layout=SMALL)
