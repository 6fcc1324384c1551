"""A follower's ledger: it keeps the whole log, goes back where an epoch voids, and gives states."""

from pathlib import Path

from atoll.coordinator.run.keys import RunKeys
from support import kit
from support.logs import EVERY, Log, open_replica, take

KEYS = RunKeys.generate()


def test_a_follower_goes_back_where_the_coordinator_does_not(tmp_path: Path) -> None:
    swarm = kit.Swarm()
    coordinator = open_replica(tmp_path / "coordinator", KEYS)
    coordinator.open_epoch(swarm.electors(), KEYS.sign)
    follower = open_replica(tmp_path / "follower", KEYS, follows=True)
    follower.adopt(coordinator.epoch_record)
    take(coordinator, swarm)
    for _ in range(EVERY + 1):
        take(follower, swarm)
    coordinator.open_epoch(swarm.electors(), KEYS.sign)
    assert not follower.adopt(coordinator.epoch_record)
    assert follower.snapshots and not coordinator.rewind()
    assert follower.rewind()
    assert follower.head == coordinator.head
    assert follower.electorate == swarm.electors()
    assert set(follower.snapshots) == {0}, "a void state is given to nobody"
    for _ in range(2 * EVERY):  # a root of a void state would make it diverge
        take(follower, swarm)
    assert not follower.diverged
    for each in (coordinator, follower):
        each.store.close()


def test_a_follower_gives_its_snapshots_also_after_a_restart(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    follower = open_replica(tmp_path / "follower", KEYS, follows=True)
    follower.adopt(log.whole.epoch_record)
    log.grow(EVERY)
    for claim, body in log.entries:
        follower.accept(claim, body)
        follower.save_due()
    assert EVERY in follower.snapshots and not log.whole.snapshots
    lent = follower.lease(EVERY)
    assert lent is not None and lent.root() == follower.state.root()
    follower.store.close()
    again = open_replica(tmp_path / "follower", KEYS, follows=True)
    assert again.head == log.whole.head and list(again.snapshots) == [EVERY]
    for each in (again, log.whole):
        each.store.close()
