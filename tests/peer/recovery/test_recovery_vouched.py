"""A joiner takes a state on the word of the run's key, until an entry certifies it."""

import asyncio
import functools
import threading

import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.run.keys import RunKeys
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.live_replica import LiveReplica
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.recovery.recovery import Recovery
from support import kit
from support.logs import Log, LogSource


class Coordinator(LogSource):
    """It signs a root for the positions of `states`, and gives no leaves."""

    def __init__(self, log, states, *, keys=None):
        super().__init__(log, name="coordinator", first_body=0, snapshots=())
        self.states, self.keys = states, keys

    async def signed_root(self, position):
        state = self.states.get(position)
        return self.log.signed_root(position, state, self.keys) if state is not None else None


class GivingCoordinator(Coordinator):
    """It has these states as well, and says so."""

    def __init__(self, log, states):
        super().__init__(log, states)
        self.snapshots = tuple(states)

    async def leaf_digests(self, position, count):
        return list(self.states[position].leaves())

    async def leaves(self, position, indices):
        for index in indices:
            yield index, self.states[position].read_leaf(index)


class Liar(LogSource):
    """It gives another state than the log's."""

    def __init__(self, log, position, state):
        super().__init__(log, name="liar", first_body=6, snapshots=(6, position))
        self.position, self.state = position, state

    def _state(self, position):
        return self.state if position == self.position else self.log.states[position]

    async def leaf_digests(self, position, count):
        return list(self._state(position).leaves())

    async def leaves(self, position, indices):
        for index in indices:
            yield index, self._state(position).read_leaf(index)


class Joiner:
    """A peer that has nothing, in a run of nine entries, of which that of 8 certifies 6."""

    def __init__(self, folder):
        self.log = Log(folder, swarm=kit.Swarm(), keys=RunKeys.generate())
        self.log.grow(9)
        core = self.log.open("joiner", is_ledger=False)
        core.adopt(self.log.whole.epoch_record)
        core.accept(*self.log.entries[0])
        self.replica = LiveReplica(core, compute=asyncio.to_thread)
        self.told = []
        self.recovery = None

    def recover(self, peers, coordinator=None):
        """Recover once more, as one process does."""

        async def listed():
            return iter([peers])

        if self.recovery is None:
            self.recovery = functools.partial(
                Recovery,
                self.replica,
                listed,
                genesis=asyncio.Event().wait,
                stall_s=0.2,
                on_event=lambda level, notice: self.told.append(notice.code),
                on_progress=lambda what, left: None,
            )

        async def main():
            recovered = await asyncio.wait_for(self.recovery(fallback=coordinator).run(), 20.0)
            await self.replica.saved()  # in this loop: it ends with the call
            return recovered

        return asyncio.run(main())

    def stands_right(self):
        state = self.log.whole.state
        return self.replica.position == 9 and self.replica.state.root() == state.root()


@pytest.fixture
def joiner(tmp_path):
    joiner = Joiner(tmp_path)
    yield joiner
    joiner.log.whole.store.close()
    joiner.replica.store.close()


def peer(log, name="a"):
    return LogSource(log, name=name, first_body=6, snapshots=(6, 8))


def test_the_newest_state_is_taken_on_the_word_of_the_runs_key(joiner):
    log = joiner.log
    recovered = joiner.recover([peer(log)], Coordinator(log, {6: log.states[6], 8: log.states[8]}))
    assert recovered.snapshot_position == 8 and recovered.donors == ("a",)
    assert joiner.stands_right()


def test_entries_decided_since_come_while_the_state_is_put_in_place(joiner, monkeypatch):
    """Else the link idles while it is hashed and written, and until the next look."""

    class Advances(LogSource):
        told, asked = 8, threading.Event()

        async def head(self):
            return (await super().head()).model_copy(update={"position": self.told})

        async def leaves(self, position, indices):
            async for leaf in super().leaves(position, indices):
                yield leaf
            self.told = 9

        async def body(self, position, start, into, *, gives_way=False):
            await super().body(position, start, into)
            self.asked.set()

    log, install = joiner.log, joiner.replica.core.install
    source = Advances(log, name="a", first_body=6, snapshots=(6, 8))

    def waiting(*given):
        assert source.asked.wait(10.0)
        return install(*given)

    monkeypatch.setattr(joiner.replica.core, "install", waiting)
    recovered = joiner.recover([source], Coordinator(log, {8: log.states[8]}))
    assert (recovered.snapshot_position, recovered.entries) == (8, 1)
    assert joiner.stands_right()


def test_the_coordinator_gives_leaves_as_well(joiner):
    class Breaks(LogSource):
        async def leaves(self, position, indices):
            raise PeerUnreachable("gone", peer="a")
            yield

    log = joiner.log
    donor = Breaks(log, name="a", first_body=6, snapshots=(6, 8))
    recovered = joiner.recover([donor], GivingCoordinator(log, {8: log.states[8]}))
    assert recovered.snapshot_position == 8 and "coordinator" in recovered.donors
    assert joiner.stands_right()


def test_a_coordinator_that_gives_too_few_leaves_is_passed_over(joiner):
    class Short(GivingCoordinator):
        async def leaves(self, position, indices):
            asked.append(position)
            return
            yield

    class InRound(LogSource):
        async def leaves(self, position, indices):
            await asyncio.sleep(0.05)
            if not asked:
                raise GaveWay("training waits for a round", peer=self.name)
            async for leaf in super().leaves(position, indices):
                yield leaf

    asked, log = [], joiner.log
    donor = InRound(log, name="a", first_body=6, snapshots=(6, 8))
    assert joiner.recover([donor], Short(log, {8: log.states[8]})).snapshot_position == 8
    assert "state.snapshot_failed" in joiner.told and joiner.stands_right()


def test_what_a_donor_in_a_round_has_not_given_the_others_give(joiner):
    class InRound(LogSource):
        async def leaves(self, position, indices):
            await asyncio.sleep(0.05)
            raise GaveWay("training waits for a round", peer=self.name)
            yield

    log = joiner.log
    donor = InRound(log, name="a", first_body=6, snapshots=(6, 8))
    recovered = joiner.recover([donor, peer(log, name="b")], Coordinator(log, {8: log.states[8]}))
    assert recovered.snapshot_position == 8 and "b" in recovered.donors
    assert joiner.stands_right()


def test_a_certified_state_is_taken_where_nobody_vouches(joiner):
    assert joiner.recover([peer(joiner.log)], Coordinator(joiner.log, {})).snapshot_position == 6
    assert joiner.stands_right()


def test_a_coordinator_that_does_not_answer_costs_half_a_stall(joiner):
    class Silent(Coordinator):
        async def signed_root(self, position):
            await asyncio.Event().wait()

    assert joiner.recover([peer(joiner.log)], Silent(joiner.log, {})).snapshot_position == 6


def test_a_coordinator_that_fails_vouches_for_nothing(joiner):
    class Away(Coordinator):
        async def signed_root(self, position):
            raise CoordinatorUnreachable("it is down")

    assert joiner.recover([peer(joiner.log)], Away(joiner.log, {})).snapshot_position == 6


def test_a_donor_that_lies_about_a_vouched_state_is_passed_over(joiner):
    log = joiner.log
    liar = Liar(log, 8, log.states[7].at(8))
    coordinator = Coordinator(log, {8: log.states[8]})
    recovered = joiner.recover([liar, peer(log, name="z")], coordinator)
    assert recovered.snapshot_position == 8 and joiner.stands_right()


def test_a_wrong_root_alone_gives_nobody_a_state(joiner):
    """A coordinator that computes wrongly: no peer has the leaves."""
    log = joiner.log
    coordinator = Coordinator(log, {8: log.states[7].at(8)})
    assert joiner.recover([peer(log)], coordinator).snapshot_position == 6
    assert joiner.stands_right()


def test_a_coordinator_that_gives_a_wrong_state_itself_gives_nobody_one(joiner):
    """Peers say what the leaves have to be."""
    log = joiner.log
    coordinator = GivingCoordinator(log, {8: log.states[7].at(8)})
    assert joiner.recover([peer(log)], coordinator).snapshot_position == 6
    assert joiner.stands_right()


def test_a_key_that_is_not_the_runs_vouches_for_nothing(joiner):
    log = joiner.log
    coordinator = Coordinator(log, {8: log.states[8]}, keys=RunKeys.generate())
    assert joiner.recover([peer(log)], coordinator).snapshot_position == 6


def test_a_root_of_another_place_in_the_log_proves_nothing(joiner):
    class Elsewhere(Coordinator):
        async def signed_root(self, position):
            return self.log.signed_root(6, self.log.states[8])

    assert joiner.recover([peer(joiner.log)], Elsewhere(joiner.log, {})).snapshot_position == 6


def test_a_contradiction_in_the_same_recovery_ends_in_the_right_state(joiner):
    log, wrong = joiner.log, joiner.log.states[7].at(8)

    class Moves(LogSource):
        asked = 0

        async def head(self):
            self.asked += 1
            if self.asked == 2:
                self.log.grow(3)
            return await super().head()

    moves = Moves(log, name="a", first_body=6, snapshots=(6, 8))
    moves.leaf_digests, moves.leaves = Liar(log, 8, wrong).leaf_digests, Liar(log, 8, wrong).leaves
    joiner.recover([moves, peer(log, name="z")], Coordinator(log, {8: wrong}))
    assert joiner.told.count("state.disproved") == 1
    assert joiner.replica.position == 12
    assert joiner.replica.state.root() == log.whole.state.root()


def test_a_liar_with_a_coordinators_help_is_found_out_by_the_log(joiner):
    """The run's key and a donor agree on a wrong state, which a later entry contradicts."""
    log, wrong = joiner.log, joiner.log.states[7].at(8)
    coordinator = Coordinator(log, {8: wrong, 10: wrong.at(10)})
    recovered = joiner.recover([Liar(log, 8, wrong)], coordinator)
    assert recovered.snapshot_position == 8 and not joiner.stands_right()
    log.grow(2)  # the entry at 10 certifies the root at 8
    joiner.recover([peer(log), Liar(log, 10, wrong.at(10))], coordinator)
    assert joiner.told.count("state.disproved") == 1
    assert joiner.replica.position == 11
    assert joiner.replica.state.root() == log.whole.state.root()
