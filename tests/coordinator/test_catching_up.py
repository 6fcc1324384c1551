"""A coordinator that was away for longer than its peers keep the bodies of updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.catching_up import LAG_S, CatchUp, Found, Lag
from atoll.coordinator.follower import Claim, Followed, Follower, Missed, NotNext, RunKey
from atoll.coordinator.rpc.client_errors import NotThere
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.status import Gap
from atoll.dht import verify
from atoll.dht.identity import Identity
from atoll.dht.testing.memory import run_virtual
from atoll.dht.testing.virtualtime import inline
from atoll.optim.log.entry import ChainMismatch, MalformedRecord, genesis_chain
from atoll.optim.log.store import LogStore
from atoll.peer.recovery.missed import MissedLog
from support import swarm as in_memory

RUN = b"r" * 32
EVERY = 2


def follow(folder: Path, genesis: Any, keys: RunKey, method: Any, run_id: bytes = RUN) -> Follower:
    chain = genesis_chain(run_id, genesis.root())
    follower = Follower(
        run_id=run_id,
        run_key=keys,
        method=method,
        store=LogStore(folder, run_id=run_id, genesis_chain=chain),
        snapshot_every=EVERY,
        verify=verify,
    )
    follower.begin(genesis)
    follower.resume()
    return follower


class Run:
    """A log that goes on while a follower is away."""

    def __init__(self, kit: Any, folder: Path, swarm: Any, keys: RunKey, run_id: bytes) -> None:
        self.kit, self.folder, self.swarm, self.keys, self.run_id = kit, folder, swarm, keys, run_id
        self.whole = self.open("whole")
        self.whole.open_epoch(swarm.electors())
        self.states = {0: self.whole.state}
        self.log: list[tuple[Claim, bytes]] = []

    def open(self, name: str) -> Follower:
        genesis, method = self.kit.genesis(), self.kit.SPEC.method()
        return follow(self.folder / name, genesis, self.keys, method, self.run_id)

    def go_on(self, count: int) -> None:
        for _ in range(count):
            head = self.whole.head
            certified = self.states.get(head.position - EVERY)
            root = None
            if head.position % EVERY == 0 and certified is not None:
                root = self.kit.root_at(certified.position, certified)
            entry, body = self.swarm.entry(self.run_id, head, state_root=root)
            claim = Claim(entry=entry, certificate=self.swarm.certify(entry))
            self.whole.accept(claim, body)
            self.states[self.whole.state.position] = self.whole.state
            self.log.append((claim, body))

    def missed(self, first_body: int) -> list[Missed]:
        def read(position: int) -> Callable[[], bytes | None]:
            body = self.log[position][1] if position >= first_body else None
            return lambda: body

        return [Missed(claim=claim, body=read(i)) for i, (claim, _) in enumerate(self.log)]

    def found(self, position: int, first_body: int) -> Found:
        missed = self.missed(first_body)
        return Found(state=self.states[position], missed=missed, donors=("12D3KooWdonor1",))


class LongRun(Run):
    """One of nine entries, of which a follower has three."""

    def __init__(self, kit: Any, folder: Path) -> None:
        keys = RunKey(signer=RunKeys.generate().signer)
        super().__init__(kit, folder, kit.Swarm(), keys, RUN)
        self.away = self.open("away")
        self.away.open_epoch(self.swarm.electors())
        self.go_on(3)
        for claim, body in self.log:
            self.away.accept(claim, body)
        self.go_on(6)


@pytest.fixture
def long_run(kit: Any, tmp_path: Path) -> Any:
    run = LongRun(kit, tmp_path)
    yield run
    run.whole.store.close()
    run.away.store.close()


def test_it_goes_on_from_a_certified_snapshot_past_a_gap(long_run: LongRun) -> None:
    away, whole = long_run.away, long_run.whole
    taken = away.install(long_run.states[6], long_run.missed(first_body=6))
    assert [(each.entry.position, each.has_body) for each in taken] == [
        (position, position >= 6) for position in range(3, 9)
    ]
    assert all(each.electorate == long_run.swarm.electors() for each in taken)
    assert away.is_current and away.head == whole.head
    assert away.state.root() == whole.state.root()
    assert away.store.gaps() == [(3, 6)] and away.store.first_with_bodies() == 6
    long_run.go_on(1)
    away.accept(*long_run.log[-1])
    assert away.state.root() == whole.state.root()


def test_bodies_that_somebody_has_kept_leave_no_gap(long_run: LongRun) -> None:
    away = long_run.away
    away.install(long_run.states[6], long_run.missed(first_body=0))
    assert away.is_current and away.store.gaps() == []
    assert away.state.root() == long_run.whole.state.root()


def test_a_gap_is_known_after_a_restart(long_run: LongRun) -> None:
    long_run.away.install(long_run.states[6], long_run.missed(first_body=6))
    long_run.away.store.close()
    long_run.away = again = long_run.open("away")
    assert again.is_current and again.head == long_run.whole.head
    assert again.state.root() == long_run.whole.state.root()


def test_a_snapshot_behind_a_gap_that_cannot_be_read_is_fetched_again(long_run: LongRun) -> None:
    long_run.away.install(long_run.states[6], long_run.missed(first_body=6))
    long_run.away.store.close()
    for path in (long_run.folder / "away").glob("snapshot-*[1-9].bin"):
        path.write_bytes(b"damaged")
    long_run.away = again = long_run.open("away")
    assert again.head == long_run.whole.head
    assert (again.is_current, again.state.position) == (False, 3)
    long_run.go_on(1)
    again.accept(*long_run.log[-1])  # is stored, and waits for the state
    assert (again.head.position, again.state.position) == (10, 3)
    assert again.install(long_run.states[6], []) == []
    assert again.is_current and again.state.root() == long_run.whole.state.root()


def test_a_state_that_no_entry_certifies_changes_nothing(long_run: LongRun) -> None:
    away = long_run.away
    for state in (long_run.states[4].at(6), long_run.states[8]):
        with pytest.raises(ChainMismatch, match="expected the root that entry"):
            away.install(state, long_run.missed(first_body=6))
    assert (away.head.position, away.state.position) == (3, 3)


def test_entries_that_are_not_the_logs_change_nothing(long_run: LongRun) -> None:
    away, missed = long_run.away, long_run.missed(first_body=6)
    claim = missed[5].claim
    forged = replace(claim, entry=claim.entry.model_copy(update={"lr": 0.0}))
    for wrong in (
        [*missed[:5], replace(missed[5], claim=forged), *missed[6:]],
        [*missed[:5], *missed[6:]],
        missed[4:],
    ):
        with pytest.raises((ChainMismatch, NotNext, ValueError)):
            away.install(long_run.states[6], wrong)
        assert away.head.position == 3 and away.is_current


def test_a_body_that_its_entry_does_not_name(long_run: LongRun) -> None:
    missed = long_run.missed(first_body=6)
    missed[7] = replace(missed[7], body=lambda: b"x" * missed[7].claim.entry.body_bytes)
    with pytest.raises(MalformedRecord, match="another digest"):
        long_run.away.install(long_run.states[6], missed)
    long_run.away.install(long_run.states[6], long_run.missed(first_body=6))
    assert long_run.away.state.root() == long_run.whole.state.root()


def test_when_a_follower_counts_as_left_behind() -> None:
    lag = Lag()
    assert not lag.is_due(5, 9, 1000.0)
    assert not lag.is_due(6, 9, 1000.0 + LAG_S)  # it moves
    assert not lag.is_due(6, 9, 999.0 + 2 * LAG_S)
    assert lag.is_due(6, 9, 1000.0 + 2 * LAG_S)
    assert not lag.is_due(6, 9, 1001.0 + 2 * LAG_S)  # one look at a time
    assert lag.is_due(6, 9, 1000.0 + 3 * LAG_S)
    assert not lag.is_due(6, 6, 1000.0 + 9 * LAG_S)  # nobody is ahead


def test_donors_that_lie_are_told_and_it_looks_again(long_run: LongRun) -> None:
    found = [replace(long_run.found(8, 6), donors=("liar00",)), long_run.found(6, 6)]
    told: list[tuple[str, str]] = []
    taken: list[Followed] = []

    @asynccontextmanager
    async def fetch(follower: Follower) -> AsyncIterator[Found | None]:
        yield found.pop(0)

    async def main() -> None:
        catching_up = CatchUp(
            long_run.away,
            fetch,
            on_taken=taken.extend,
            say=lambda level, text: told.append((level, text)),
        )
        catching_up.look(9, 0.0)
        for looks in (1, 2):
            catching_up.look(9, looks * LAG_S)
            while len(told) < looks:
                await asyncio.sleep(0.01)
        await catching_up.close()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    assert [level for level, _ in told] == ["warning", "warning"]
    assert told[0][1].startswith("what liar00 sent of missed rounds is no use: snapshot 8")
    assert told[1][1] == (
        "caught up from round 3 to 9 by the snapshot after round 6 and entries of donor1; "
        "no peer has kept the updates of rounds 4 to 6"
    )
    assert len(taken) == 6


def test_a_coordinator_says_which_updates_it_lacks(kit: Any, tmp_path: Path) -> None:
    told: list[Found] = []

    @asynccontextmanager
    async def fetch(follower: Follower) -> AsyncIterator[Found | None]:
        yield told.pop()

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            coordinator = net.up.coordinator
            keys = RunKey(signer=coordinator.keys.signer)
            run = Run(kit, tmp_path, net.swarm, keys, net.run_id)
            assert run.whole.epoch_record == coordinator.follower.epoch_record
            run.go_on(7)
            entry, body = run.log[0][0].entry, run.log[0][1]
            assert await net.publish(one, entry, body)
            catching_up = coordinator.fetch_missed_with(fetch)
            told.append(run.found(4, first_body=4))
            await one.heartbeat(net.swarm.status(0, position=7))
            now_s = coordinator._steady()
            for later_s in (0.0, LAG_S):
                catching_up.look(coordinator._claimed(now_s), now_s + later_s)
            while coordinator.head().position < 7 or not coordinator.follower.is_current:
                await asyncio.sleep(0.01)
            await catching_up.close()
            status = await one.status()
            assert status.gaps == [Gap(first=2, last=4)]
            assert [row.position for row in status.history] == [1, 2, 3, 4, 5, 6, 7]
            assert status.tokens_total == 2100 and status.state == "finished"
            assert (await one.fetch_snapshot()).first_body == 4
            got = [each.position async for each in one.fetch_entries(4, 9)]
            assert got == [4, 5, 6]
            with pytest.raises(NotThere, match="the body of entry 1 is not here"):
                [_ async for _ in one.fetch_entries(0, 9)]
            assert len([_ async for _ in one.fetch_entries(0, 9, bodies=False)]) == 7
            run.whole.store.close()
        async with kit.net(tmp_path / "run", net.swarm) as net:
            again = net.up.coordinator.status()
            assert (again.gaps, again.history) == (status.gaps, status.history)
            texts = [event.text for event in again.events]
            assert texts.count("finished: all 6 rounds are done") == 1
            assert net.up.coordinator.last_checkpoint().name == "test-00000007.safetensors"

    kit.run(main())


def test_entries_that_come_while_it_installs_are_not_waited_for(kit: Any, tmp_path: Path) -> None:
    hold, begun = threading.Event(), threading.Event()
    told: list[Found] = []

    def held() -> bytes | None:
        begun.set()
        assert hold.wait(20.0)
        return None

    @asynccontextmanager
    async def fetch(follower: Follower) -> AsyncIterator[Found | None]:
        yield told.pop()

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            keys = RunKey(signer=net.up.coordinator.keys.signer)
            run = Run(kit, tmp_path, net.swarm, keys, net.run_id)
            run.go_on(5)
            found = run.found(2, first_body=2)
            first, *rest = found.missed
            told.append(replace(found, missed=[replace(first, body=held), *rest]))
            catching_up = net.up.coordinator.fetch_missed_with(fetch)
            catching_up.look(5, 0.0)
            catching_up.look(5, LAG_S)
            assert await asyncio.to_thread(begun.wait, 20.0)
            claim, body = run.log[0]
            assert not await net.publish(one, claim.entry, body)
            assert net.up.coordinator.head().position == 0
            hold.set()
            await catching_up.close()
            assert net.up.coordinator.head().position == 5
            run.whole.store.close()

    try:
        kit.run(main())
    finally:
        hold.set()


# With peers that train, in memory


def missed_log(swarm: in_memory.Swarm, folder: Path) -> MissedLog:
    identity = Identity.ephemeral()
    return MissedLog(
        identity=identity,
        transport=swarm.network.transport(identity.peer_id),
        roster=swarm.board.roster(identity.peer_id),
        folder=folder,
        compute=inline,
    )


def publish(peer: Any, follower: Follower) -> None:
    """What a peer sends the coordinator over gRPC, as long as it has it."""
    store = peer.replica.store
    for position in range(follower.head.position, peer.replica.position):
        record = store.get(position)
        follower.accept(follower.precheck(record.entry, record.certificate), store.body(position))


def in_a_swarm(
    tmp_path: Path, main: Callable[[in_memory.Swarm, Follower], Awaitable[None]], **options: Any
) -> None:
    async def run() -> None:
        swarm = in_memory.Swarm(tmp_path / "peers", **options)
        keys = RunKey(signer=in_memory.ORGANISER._key)
        follower = follow(
            tmp_path / "log", in_memory.genesis(swarm.replay), keys, swarm.replay.method
        )
        try:
            peers = [swarm.add() for _ in range(3)]
            follower.open_epoch([peer.ctx.me for peer in peers])
            for peer in peers:
                await peer.start(follower.epoch_record)
            await main(swarm, follower)
        finally:
            await swarm.stop()
            follower.store.close()

    run_virtual(run())


def test_it_comes_back_to_peers_that_have_pruned_what_it_missed(tmp_path: Path) -> None:
    async def main(swarm: in_memory.Swarm, follower: Follower) -> None:
        one = swarm.peers[0]
        await swarm.until(lambda: one.replica.position == 3)
        publish(one, follower)
        await swarm.until(lambda: one.replica.position == 15)
        first = min(peer.replica.store.first_with_bodies() for peer in swarm.peers)
        assert first > 3
        fetch = missed_log(swarm, tmp_path / "catching-up")
        async with fetch(follower) as found:
            assert found is not None and set(found.donors) <= {
                peer.identity.peer_id for peer in swarm.peers
            }
            follower.install(found.state, found.missed)
        assert not (tmp_path / "catching-up").exists()
        assert follower.is_current and follower.head.position >= 15
        assert follower.store.gaps() == [(3, first)]
        await swarm.until(lambda: one.replica.position == follower.head.position + 2)
        publish(one, follower)
        assert follower.head.chain == one.replica.chain
        assert follower.state.root() == one.replica.state.root()

    in_a_swarm(tmp_path, main, body_budget_bytes=0)


def test_what_a_peer_can_publish_is_not_fetched(tmp_path: Path) -> None:
    async def main(swarm: in_memory.Swarm, follower: Follower) -> None:
        one = swarm.peers[0]
        await swarm.until(lambda: one.replica.position == 5)
        fetch = missed_log(swarm, tmp_path / "catching-up")
        async with fetch(follower) as found:
            assert found is None
        publish(one, follower)
        async with fetch(follower) as found:
            assert found is None

    in_a_swarm(tmp_path, main)
