"""One replica: what it accepts, applies, keeps and takes up again, as a ledger and as a peer's."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.coordinator.run.keys import RunKeys
from atoll.dht import verify
from atoll.optim.log.claims import LogPlace, verify_claims
from atoll.optim.log.electorate import at_base
from atoll.optim.log.entry import (
    CertificateInvalid,
    ChainMismatch,
    Epoch,
    EpochInvalid,
    MalformedRecord,
    SignedEpoch,
    SignedRoot,
    epoch_payload,
    root_payload,
)
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.log.replica import Replica
from atoll.optim.log.standing import NotNext
from atoll.optim.reduction.cells import Cells, UpdateError
from atoll.optim.state.outer_state import OuterState
from support import kit
from support.logs import RUN, Log, encoded, open_replica, take

KEYS = RunKeys.generate()
Open = Callable[[], Replica]


@pytest.fixture(params=[True, False], ids=["ledger", "peer"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the replica of this test, again if it was open."""
    opened: list[Replica] = []

    def open_again() -> Replica:
        for replica in opened:
            replica.store.close()
        opened.append(open_replica(tmp_path / "log", KEYS, is_ledger=request.param))
        return opened[-1]

    yield open_again
    for replica in opened:
        replica.store.close()


@pytest.fixture
def swarm() -> kit.Swarm:
    return kit.Swarm()


# The log


def test_nothing_is_taken_before_an_epoch_is_open(reopen: Open, swarm: kit.Swarm) -> None:
    with pytest.raises(NotNext):
        take(reopen(), swarm)


def test_null_entries_move_on_without_changing_the_state(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    take(replica, swarm, kind="null", members=(), parts=())
    assert replica.position == replica.state.position == 1
    assert replica.state.root() == kit.genesis().root()
    take(replica, swarm)
    assert replica.state.root() != kit.genesis().root()


def test_another_entry_was_quicker(reopen: Open, swarm: kit.Swarm) -> None:
    """Two bodies of one position may be on their way; the second to come changes nothing."""
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, body = swarm.entry(RUN, replica.head)
    late = replica.check(entry, swarm.certify(entry))
    take(replica, swarm, kind="null", members=(), parts=())
    before = replica.standing
    with pytest.raises(NotNext):
        replica.accept(late, body)
    assert replica.standing is before and replica.store.head.position == 1


def test_an_epoch_that_begins_while_a_body_comes_voids_the_entry(
    reopen: Open, swarm: kit.Swarm
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, body = swarm.entry(RUN, replica.head)
    late = replica.check(entry, swarm.certify(entry))
    replica.open_epoch(swarm.electors(), KEYS.sign)
    with pytest.raises(NotNext):
        replica.accept(late, body)
    assert replica.position == replica.store.head.position == 0


def test_an_entry_without_a_quorum_is_refused(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, _ = swarm.entry(RUN, replica.head)
    for certificate in (swarm.certify(entry, voters=(0,)), kit.Swarm().certify(entry)):
        with pytest.raises(CertificateInvalid):
            replica.check(entry, certificate)


def test_an_entry_of_another_fragment_than_is_due_is_refused(
    reopen: Open, swarm: kit.Swarm
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, _ = swarm.entry(RUN, replica.head, fragment=1)
    with pytest.raises(MalformedRecord, match="expected fragment 0, got 1"):
        replica.check(entry, swarm.certify(entry))


@pytest.mark.parametrize("kind", ["update", "null"])
def test_a_body_that_is_not_the_entrys_is_not_stored(
    reopen: Open, swarm: kit.Swarm, kind: str
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, body = swarm.entry(RUN, replica.head)
    if kind == "null":
        entry, body = swarm.null(RUN, replica.head), b"x"
    expect_body_refused(replica, swarm, entry, body)


def test_a_diverged_ledger_still_checks_bodies(tmp_path: Path, swarm: kit.Swarm) -> None:
    replica = open_replica(tmp_path, KEYS)
    replica.open_epoch(swarm.electors(), KEYS.sign)
    replica.standing = replace(replica.standing, diverged="by a fault")
    expect_body_refused(replica, swarm, *swarm.entry(RUN, replica.head))
    replica.store.close()


def expect_body_refused(replica, swarm, entry, body) -> None:
    claim = replica.check(entry, swarm.certify(entry))
    wrong = bytearray(body)
    wrong[-1] ^= 1
    with pytest.raises(MalformedRecord, match="body of entry 0"):
        replica.accept(claim, wrong)
    assert replica.position == replica.store.head.position == 0


def test_a_certified_root_that_is_not_ours_is_reported(tmp_path: Path, swarm: kit.Swarm) -> None:
    replica = open_replica(tmp_path, KEYS)
    replica.open_epoch(swarm.electors(), KEYS.sign)
    take(replica, swarm)
    take(replica, swarm)
    good = kit.root_at(2, replica.state)
    take(replica, swarm, state_root=good)
    assert not replica.diverged
    bad = good.model_copy(update={"root": b"x" * 32})
    take(replica, swarm, state_root=bad)
    assert "this machine computes wrongly" in replica.diverged
    assert 4 not in replica.store.snapshot_positions()
    position = replica.state.position
    take(replica, swarm)
    assert replica.head.position == 5 and replica.state.position == position
    replica.store.close()


# Epochs and restarts


def test_a_new_epoch_begins_at_the_head_with_other_electors(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    take(replica, swarm)
    old_entry, _ = swarm.entry(RUN, replica.head)
    others = kit.Swarm()
    epoch = replica.open_epoch(others.electors(), KEYS.sign)
    assert (epoch.epoch, epoch.base_position) == (1, 1)
    assert epoch.base_chain == replica.chain
    assert replica.read_epoch(replica.epoch_record) == epoch
    with pytest.raises(NotNext):
        replica.check(old_entry, swarm.certify(old_entry))
    away = {elector.peer_id for elector in swarm.electors()}
    assert {newcomer.peer_id for newcomer in epoch.newcomers} == away
    assert replica.voters == at_base(epoch)
    replica = reopen()
    assert replica.voters == at_base(epoch)
    with pytest.raises(CertificateInvalid):
        take(replica, swarm)
    take(replica, others)
    again = reopen()
    assert again.head == replica.head and again.electorate == replica.electorate


def test_an_electorate_of_an_epoch_survives_a_restart(reopen: Open, swarm: kit.Swarm) -> None:
    reopen().open_epoch(swarm.electors(), KEYS.sign)
    again = reopen()
    assert again.electorate == swarm.electors() and again.opened is not None
    take(again, swarm)


def test_a_stored_epoch_of_another_key_is_refused_at_a_restart(
    reopen: Open, swarm: kit.Swarm
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    raw = SignedEpoch.decode(replica.epoch_record).epoch
    signature = RunKeys.generate().sign(epoch_payload(raw))
    replica.store.put_epoch(0, SignedEpoch(epoch=raw, signature=signature).encode())
    with pytest.raises(EpochInvalid, match="the run's key"):
        reopen()


def test_an_epoch_of_another_run_is_refused(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    epoch = Epoch(
        run_id=b"o" * 32,
        epoch=0,
        base_position=0,
        base_chain=replica.chain,
        electorate=swarm.electors(),
    ).encode()
    record = SignedEpoch(epoch=epoch, signature=KEYS.sign(epoch_payload(epoch))).encode()
    with pytest.raises(EpochInvalid, match="this run"):
        replica.adopt(record)


def test_a_peer_that_ends_before_it_goes_back_has_no_electorate(
    tmp_path: Path, swarm: kit.Swarm
) -> None:
    """It would vote after entries that the epoch has voided, and never go back to its base."""
    replica, other = open_replica(tmp_path / "a", KEYS, is_ledger=False), None
    replica.open_epoch(swarm.electors(), KEYS.sign)
    other = open_replica(tmp_path / "b", KEYS)
    other.adopt(replica.epoch_record)
    take(other, swarm)
    for _ in range(3):
        take(replica, swarm)
    other.open_epoch(swarm.electors(), KEYS.sign)
    assert not replica.adopt(other.epoch_record)
    replica.store.close()
    again = open_replica(tmp_path / "a", KEYS, is_ledger=False)
    assert (again.position, again.epoch, again.electorate) == (3, 1, ())
    assert again.rewind()
    assert again.head == other.head and again.electorate == swarm.electors()
    for each in (again, other):
        each.store.close()


def test_a_log_cannot_go_back_over_a_body_that_its_disk_has_spoiled(
    tmp_path: Path, swarm: kit.Swarm
) -> None:
    """It would try that ever after, and fetch nothing."""
    peer = open_replica(tmp_path / "a", KEYS, is_ledger=False)
    peer.open_epoch(swarm.electors(), KEYS.sign)
    other = open_replica(tmp_path / "b", KEYS)
    other.adopt(peer.epoch_record)
    take(other, swarm)
    for _ in range(3):
        take(peer, swarm)
    other.open_epoch(swarm.electors(), KEYS.sign)
    assert not peer.adopt(other.epoch_record)
    peer.store.write_bodies()
    with sqlite3.connect(tmp_path / "a" / "log.sqlite") as db:
        db.execute("UPDATE bodies SET data = zeroblob(length(data)) WHERE position = 0")
    assert not peer.rewind()
    assert peer.position == 0 and not peer.electorate  # fetched again from there
    for each in (peer, other):
        each.store.close()


def test_a_log_of_another_chain_cannot_go_back(tmp_path: Path, swarm: kit.Swarm) -> None:
    """It would vote on a state that the epoch does not continue."""
    peer = open_replica(tmp_path / "peer", KEYS, is_ledger=False)
    peer.open_epoch(swarm.electors(), KEYS.sign)
    other = open_replica(tmp_path / "other", KEYS)
    other.adopt(peer.epoch_record)
    take(other, swarm, kind="null", members=(), parts=())
    for _ in range(3):
        take(peer, swarm)
    other.open_epoch(swarm.electors(), KEYS.sign)
    assert not peer.adopt(other.epoch_record)
    assert not peer.rewind()
    assert peer.position == 3 and peer.electorate == ()
    for each in (peer, other):
        each.store.close()


def test_a_log_that_begins_after_the_base_cannot_go_back(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(2)
    early = log.open("early")
    early.adopt(log.whole.epoch_record)
    early.accept(*log.entries[0])
    log.grow(5)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    peer.install(log.states[4], log.claims(2))
    early.open_epoch(log.swarm.electors(), KEYS.sign)
    assert not peer.adopt(early.epoch_record)
    assert not peer.rewind() and peer.electorate == ()
    for each in (log.whole, early, peer):
        each.store.close()


def test_the_electors_of_an_epoch_vote_from_its_base_on(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    early = log.open("early", is_ledger=False)
    early.adopt(log.whole.epoch_record)
    log.grow(2)
    log.whole.open_epoch(log.swarm.electors()[:1], KEYS.sign)
    assert not early.adopt(log.whole.epoch_record)
    claims = early.verify(log.records(), None)
    for claim, (_, body) in zip(claims, log.entries, strict=True):
        early.accept(claim, body)
    assert early.head == log.whole.head
    assert early.electorate == log.swarm.electors()[:1]
    for each in (early, log.whole):
        each.store.close()


def test_entries_before_a_base_must_end_there_in_its_chain(tmp_path: Path) -> None:
    """No certificate of theirs counts any more, so only that chain proves them."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(2)
    records, opened = log.records(), log.whole.open_epoch(log.swarm.electors(), KEYS.sign)
    log.whole.store.close()
    forged = log.entries[1][0].entry.model_copy(update={"lr": 0.25}).encode()

    def verified(*records: tuple[bytes, bytes]) -> int:
        return len(verify_claims(records, run_id=RUN, here=None, opened=opened, verify=verify))

    assert verified(*records) == 2
    for wrong in (records[:1], [records[0], (forged, records[1][1])]):
        with pytest.raises(ChainMismatch, match="up to the base 2"):
            verified(*wrong)


# Recovery: a ledger keeps what it had


class LongLog(Log):
    """One of nine entries, of which the replica `away` has three."""

    def __init__(self, folder: Path, *, is_ledger: bool = True) -> None:
        super().__init__(folder, swarm=kit.Swarm(), keys=KEYS)
        self.is_ledger = is_ledger
        self.away = self.open("away", is_ledger=is_ledger)
        self.away.adopt(self.whole.epoch_record)
        self.grow(3)
        for claim, body in self.entries:
            self.away.accept(claim, body)
        self.grow(6)

    def restart(self) -> Replica:
        self.away.store.write_bodies()
        self.away.store.close()
        self.away = self.open("away", is_ledger=self.is_ledger)
        return self.away

    def recover(self) -> None:
        """As `atoll.peer.recovery` does: the newest certified snapshot, then entries."""
        self.away.install(self.states[6], self.claims())
        for claim, body in self.entries[6:]:
            self.away.accept(claim, body)

    def close(self) -> None:
        self.whole.store.close()
        self.away.store.close()


@pytest.fixture
def long_log(tmp_path: Path) -> Iterator[LongLog]:
    log = LongLog(tmp_path)
    yield log
    log.close()


@pytest.fixture(params=[True, False], ids=["ledger", "peer"])
def any_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LongLog]:
    log = LongLog(tmp_path, is_ledger=request.param)
    yield log
    log.close()


def test_it_continues_from_a_certified_snapshot_past_a_gap(long_log: LongLog) -> None:
    away, whole = long_log.away, long_log.whole
    new = away.install(long_log.states[6], long_log.claims())
    assert [claim.entry.position for claim in new] == [3, 4, 5]
    assert all(away.electorate_at(p) == long_log.swarm.electors() for p in range(7))
    for claim, body in long_log.entries[6:]:
        away.accept(claim, body)
    assert away.is_current and away.head == whole.head
    assert away.state.root() == whole.state.root()
    assert away.store.gaps() == [(3, 6)] and away.store.first_with_bodies() == 6
    long_log.grow(1)
    away.accept(*long_log.entries[-1])
    assert away.state.root() == whole.state.root()


def test_a_log_that_begins_later_does_not_follow_the_first_state(
    long_log: LongLog,
) -> None:
    """So it is where a restored ledger's only state has rotted, and the first one was made."""
    whole = long_log.whole
    later = open_replica(long_log.folder / "later", long_log.keys, resumes=False)
    later.store.begin_at(position=6, chain=long_log.entries[5][0].entry.chain)
    later.store.put_epoch(0, whole.epoch_record)
    for claim, body in long_log.entries[6:]:
        later.store.append(
            epoch=0,
            position=claim.entry.position,
            entry=claim.entry.encode(),
            certificate=claim.certificate.encode(),
            body=body,
            chain=claim.entry.chain,
        )
    later.store.save_snapshot(long_log.states[0], whole.store.genesis_chain)
    assert later.resume()
    assert later.head == whole.head and not later.is_current
    assert later.state.root() == long_log.states[0].root()
    later.store.close()


def test_a_peers_log_begins_anew_at_a_snapshot(tmp_path: Path) -> None:
    log = LongLog(tmp_path, is_ledger=False)
    leaps = log.away.leaps
    log.away.install(log.states[6], log.claims(start=4))
    assert [r.position for r in log.away.store.headers(0, 99)] == [4, 5]
    log.away.save_due()
    assert log.away.leaps == leaps + 1 and set(log.away.snapshots) == {6}
    log.recover()
    assert log.away.head == log.whole.head
    assert log.away.state.root() == log.whole.state.root()
    log.close()


def test_bodies_that_somebody_has_kept_leave_no_gap(long_log: LongLog) -> None:
    long_log.recover()
    for position in (5, 4, 3):
        long_log.away.add_body(position, long_log.entries[position][1])
    away = long_log.restart()
    assert away.is_current and away.store.gaps() == []
    assert away.state.root() == long_log.whole.state.root()


def test_a_gap_is_known_after_a_restart(any_log: LongLog) -> None:
    any_log.recover()
    again = any_log.restart()
    assert again.is_current and again.head == any_log.whole.head
    assert again.electorate == any_log.whole.electorate
    assert again.state.root() == any_log.whole.state.root()


def test_a_snapshot_behind_a_gap_that_cannot_be_read_is_fetched_again(long_log: LongLog) -> None:
    long_log.recover()
    for path in (long_log.folder / "away").glob("snapshot-*[1-9].bin"):
        path.write_bytes(b"damaged")
    again = long_log.restart()
    assert again.head == long_log.whole.head
    assert (again.is_current, again.state.position) == (False, 3)
    long_log.grow(1)
    again.accept(*long_log.entries[-1])  # is stored, and waits for the state
    assert (again.head.position, again.state.position) == (10, 3)
    assert again.install(long_log.states[6]) == []  # what certifies it is in its own log
    assert again.is_current and again.state.root() == long_log.whole.state.root()


def test_a_full_disk_in_the_middle_of_a_recovery(
    long_log: LongLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stored = long_log.away.store, []
    append = store.append_header

    def full(**record: object) -> None:
        if len(stored) == 2:
            raise OSError("no space left on device")
        stored.append(record)
        append(**record)

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_header", full)
        with pytest.raises(OSError, match="no space"):
            long_log.away.install(long_log.states[6], long_log.claims())
    assert long_log.away.head == store.head and long_log.away.position == 5
    assert not long_log.away.is_current
    long_log.recover()
    assert long_log.away.is_current and long_log.away.head == long_log.whole.head


def test_a_state_that_no_entry_certifies_changes_nothing(any_log: LongLog) -> None:
    away = any_log.away
    for state in (any_log.states[4].at(6), any_log.states[8], any_log.states[4].at(0)):
        with pytest.raises(ChainMismatch, match=r"the root that entry|the first state"):
            away.install(state, any_log.claims())
    assert (away.head.position, away.state.position) == (3, 3)


def signed(state: OuterState, chain: bytes, *, keys: RunKeys = KEYS) -> SignedRoot:
    payload = root_payload(RUN, state.position, chain, state.root())
    return SignedRoot(
        position=state.position, chain=chain, root=state.root(), signature=keys.sign(payload)
    )


def test_a_root_by_the_runs_key_does_where_no_entry_certifies_it(tmp_path: Path) -> None:
    log = LongLog(tmp_path, is_ledger=False)
    peer, state, chain = log.away, log.states[9], log.whole.chain
    with pytest.raises(ChainMismatch, match="the root that entry"):
        peer.install(state, log.claims())
    peer.install(state, log.claims(), signed(state, chain))
    assert peer.head == log.whole.head and peer.electorate == log.whole.electorate
    assert peer.state.root() == log.whole.state.root()
    log.grow(1)
    peer.accept(*log.entries[9])
    for each in (peer, log.whole):
        each.store.close()


def test_a_root_that_the_runs_key_did_not_sign_proves_nothing(tmp_path: Path) -> None:
    log = LongLog(tmp_path, is_ledger=False)
    state, chain = log.states[9], log.whole.chain
    good = signed(state, chain)
    of_another_run = replace(
        good, signature=KEYS.sign(root_payload(b"x" * 32, 9, chain, good.root))
    )
    for wrong in (
        signed(state, chain, keys=RunKeys.generate()),
        signed(state, log.away.chain),
        signed(log.states[8].at(9), chain),
        signed(log.states[8], chain),
        of_another_run,
    ):
        with pytest.raises(ChainMismatch):
            log.away.install(state, log.claims(), wrong)
        assert log.away.position == 3
    for each in (log.away, log.whole):
        each.store.close()


def test_a_vouched_state_that_an_entry_contradicts_is_dropped(tmp_path: Path) -> None:
    """The run's key signed it, and the log decides."""
    log = LongLog(tmp_path, is_ledger=False)
    peer, wrong = log.away, log.states[7].at(8)
    peer.install(wrong, log.claims(), log.signed_root(8, wrong))
    log.grow(2)
    for position in (8, 9):
        peer.accept(*log.entries[position])
        assert not peer.is_disproved and peer.electorate
    peer.accept(*log.entries[10])  # which certifies the root at 8
    assert peer.is_disproved and not peer.takes_signed
    assert not peer.electorate and not peer.snapshots
    log.whole.open_epoch(log.swarm.electors(), KEYS.sign)  # where the peer stands
    assert not peer.adopt(log.whole.epoch_record) and not peer.electorate
    log.grow(1)
    with pytest.raises(ChainMismatch, match="expected the certified root"):
        peer.accept(*log.entries[11])
    peer.save_due()
    assert peer.store.snapshot_positions() == []
    peer.install(log.states[8], log.claims())
    for claim, body in log.entries[8:]:
        peer.accept(claim, body)
    assert peer.is_current and peer.state.root() == log.whole.state.root()
    assert peer.electorate and peer.head == log.whole.head
    log.close()


def test_a_restart_drops_a_vouched_state_that_its_log_contradicts(tmp_path: Path) -> None:
    """The process ended after it had stored the entry, and before it had compared the root."""
    log = LongLog(tmp_path, is_ledger=False)
    wrong = log.states[7].at(8)
    log.away.install(wrong, log.claims(), log.signed_root(8, wrong))
    log.grow(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.away, "_compared", lambda at, certified: at)
        for position in (8, 9, 10):
            log.away.accept(*log.entries[position])
    log.away.store.drop_snapshots([10])
    peer = log.restart()
    assert peer.is_disproved and not peer.electorate
    log.close()


def lose(log: Log, position: int) -> None:
    assert log.whole.store.drop_damaged(position, log.entries[position][0].entry.encode())


def test_a_ledger_bridges_an_update_that_its_disk_has_lost(tmp_path: Path) -> None:
    """Else nobody could get to its state from what it has stored: not itself after a restart."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(9)
    before = log.whole.store.snapshot_positions()
    log.whole.bridge_gap()
    lose(log, before[-1] - 1)
    log.whole.bridge_gap()
    assert log.whole.store.snapshot_positions() == before  # one lies after the gap
    lose(log, 8)
    log.whole.bridge_gap()
    assert log.whole.store.snapshot_positions()[-1] == 9
    log.whole.store.close()
    again = log.open("whole")
    assert again.is_current and again.state.root() == log.states[9].root()
    again.store.close()


def test_a_ledger_takes_no_entries_with_a_hole(long_log: LongLog) -> None:
    away, claims = long_log.away, long_log.claims()
    for wrong in ([*claims[:5], *claims[6:]], claims[4:], claims[6:]):
        with pytest.raises(NotNext):
            away.install(long_log.states[6], wrong)
        assert away.head.position == 3 and away.is_current


def test_recovered_entries_need_their_certificates(any_log: LongLog) -> None:
    """A donor can send anything: entries of its own, or those of the log in another order."""
    away, claims = any_log.away, any_log.claims(start=3)
    here = LogPlace(chain=away.chain, electorate=away.electorate)
    assert away.verify(encoded(claims), here) == claims
    forged = replace(claims[2], entry=claims[2].entry.model_copy(update={"lr": 0.0}))
    few = replace(claims[2], certificate=any_log.swarm.certify(claims[2].entry, voters=(1,)))
    for wrong, error in (
        ([*claims[:2], forged, *claims[3:]], CertificateInvalid),
        ([*claims[:2], few, *claims[3:]], CertificateInvalid),
        ([*claims[:2], *claims[3:]], ChainMismatch),
        (claims[1:], ChainMismatch),
    ):
        with pytest.raises(error):
            away.verify(encoded(wrong), here)


def test_a_body_that_its_entry_does_not_name_fills_no_gap(long_log: LongLog) -> None:
    long_log.recover()
    wrong = b"x" * len(long_log.entries[4][1])
    with pytest.raises(MalformedRecord, match="another digest"):
        long_log.away.add_body(4, wrong)
    assert long_log.away.store.gaps() == [(3, 6)]


def test_a_snapshot_whose_root_is_certified_is_the_oldest_that_joiners_get(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for _ in range(9):
        log.grow(1)
        peer.accept(*log.entries[-1])
        peer.save_due()
    assert set(peer.snapshots) == {6, 8} and log.whole.snapshots == {}
    assert peer.root_due(10) == (8, log.states[8].root())
    for each in (peer, log.whole):
        each.store.close()


def test_an_entry_counts_while_its_snapshot_is_written(tmp_path: Path) -> None:
    """Listeners hear of it at once; the entry before the one with the root waits for the disk."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    core = log.open("peer", is_ledger=False)
    core.adopt(log.whole.epoch_record)
    log.grow(6)
    begun, hold = threading.Event(), threading.Event()
    write = core.store.write_snapshot

    def held(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert hold.wait(20.0)
        return write(*arguments, **options)

    core.store.write_snapshot = held  # type: ignore[method-assign]

    async def main() -> None:
        peer, heard = LiveReplica(core, compute=asyncio.to_thread), list[int]()
        peer.listeners.append(lambda applied: heard.append(applied.entry.position))
        for claim, body in log.entries[:3]:
            assert await peer.accept_claim(claim, body)
        assert await asyncio.to_thread(begun.wait, 20.0)
        assert heard == [0, 1, 2] and peer.position == 3 and set(peer.snapshots) == {0}
        waiting = asyncio.create_task(peer.accept_claim(*log.entries[3]))
        await peer.verify([], None)  # a turn of the loop and of a thread
        assert heard == [0, 1, 2] and not waiting.done()
        hold.set()
        assert await waiting
        assert peer.root_due(4) == (2, log.states[2].root())
        for claim, body in log.entries[4:]:
            assert await peer.accept_claim(claim, body)
        await peer.close()
        assert set(peer.snapshots) == {2, 4, 6}

    try:
        asyncio.run(asyncio.wait_for(main(), 60.0))
    finally:
        hold.set()
    log.whole.store.close()


def test_a_commit_is_heard_before_its_body_is_on_disk(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    core = log.open("peer", is_ledger=False)
    core.adopt(log.whole.epoch_record)
    log.grow(2)
    hold, write = threading.Event(), core.store._write_body

    def held(*arguments: Any) -> None:
        assert hold.wait(20.0)
        write(*arguments)

    core.store._write_body = held  # type: ignore[method-assign]

    async def main() -> None:
        peer, heard = LiveReplica(core, compute=asyncio.to_thread), list[int]()
        peer.listeners.append(lambda applied: heard.append(applied.entry.position))
        assert await peer.accept_claim(*log.entries[0])
        assert heard == [0] and core.store.has_unwritten
        assert core.store.body(0) == log.entries[0][1]  # others may have it
        waiting = asyncio.create_task(peer.accept_claim(*log.entries[1]))
        await peer.verify([], None)  # a turn of the loop and of a thread
        assert heard == [0] and not waiting.done()  # no more than one body waits in memory
        hold.set()
        assert await waiting
        await peer.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 60.0))
    finally:
        hold.set()
    again = log.open("peer", is_ledger=False)
    assert again.state.root() == log.whole.state.root()
    for each in (again, log.whole):
        each.store.close()


def test_an_entry_that_comes_twice_is_held_by_nobody(tmp_path: Path) -> None:
    """Not until the garbage collector runs either: a body takes a byte a parameter, or more."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    core = log.open("peer", is_ledger=False)
    core.adopt(log.whole.epoch_record)
    log.grow(1)
    ((claim, body),) = log.entries

    async def main() -> list[weakref.ref[Any]]:
        peer, gone = LiveReplica(core, compute=asyncio.to_thread), list[weakref.ref[Any]]()

        async def commit() -> bool:
            lent = np.frombuffer(body, dtype=np.uint8).copy()
            gone.append(weakref.ref(lent))
            return await peer.accept(claim.entry, claim.certificate, memoryview(lent))

        assert sorted(await asyncio.gather(commit(), commit())) == [False, True]
        assert not await commit()
        await peer.close()
        return gone

    gc.disable()
    try:
        gone = asyncio.run(main())
        assert [ref() is None for ref in gone] == [True, True, True]
    finally:
        gc.enable()
    log.whole.store.close()


def test_an_entry_that_comes_twice_is_no_failure_though_its_caller_is_gone(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    core = log.open("peer", is_ledger=False)
    core.adopt(log.whole.epoch_record)
    log.grow(1)
    ((claim, body),) = log.entries

    async def main() -> list[dict[str, Any]]:
        peer, failures = LiveReplica(core, compute=asyncio.to_thread), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        first, second = (
            asyncio.create_task(peer.accept(claim.entry, claim.certificate, body)) for _ in "12"
        )
        await asyncio.sleep(0)  # both have begun, and one of them has the lock
        await asyncio.sleep(0)
        second.cancel()
        assert await first
        await peer.close()
        return failures

    assert asyncio.run(main()) == []
    log.whole.store.close()


@pytest.mark.parametrize("is_ledger", [True, False])
def test_a_crash_before_the_snapshot_is_written_costs_a_replay(
    tmp_path: Path, is_ledger: bool
) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(4)
    crashed = log.open("it", is_ledger=is_ledger)
    crashed.adopt(log.whole.epoch_record)
    for claim, body in log.entries:
        crashed.accept(claim, body)
    assert crashed.due is not None and crashed.store.snapshot_positions() == [0, 2]
    crashed.store.write_bodies()
    crashed.store.write_snapshot(crashed.due.state, crashed.due.chain)  # and no row for it
    crashed.store.close()
    again = log.open("it", is_ledger=is_ledger)
    assert (again.position, again.chain) == (4, log.whole.chain)
    assert again.state.root() == log.states[4].root()
    assert again.store.load_snapshot(4).root() == log.states[4].root()
    assert set(again.snapshots) == (set() if is_ledger else {2, 4})
    assert not list((tmp_path / "it").glob("*.new"))
    for each in (again, log.whole):
        each.store.close()


def test_a_peer_that_dies_before_it_wrote_a_body_takes_the_entry_again(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(3)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for entry in log.entries:
        peer.accept(*entry)
    assert peer.has_unsaved and peer.position == 3
    peer.store.close()  # as a death does, it leaves the last body unwritten
    again = log.open("peer", is_ledger=False)
    assert (again.position, again.store.head.position) == (2, 2)
    assert again.state.root() == log.states[2].root()
    again.accept(*log.entries[2])
    again.save_due()
    assert again.state.root() == log.states[3].root() and again.store.gaps() == []
    for each in (again, log.whole):
        each.store.close()


def test_an_epoch_may_void_the_entry_whose_body_was_never_written(tmp_path: Path) -> None:
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    log.grow(2)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for entry in log.entries:
        peer.accept(*entry)
    peer.save_due()
    other = Log(tmp_path / "other", swarm=log.swarm, keys=KEYS)
    other.grow(2)
    log.grow(1)
    peer.accept(*log.entries[2])
    peer.store.close()
    other.whole.open_epoch(log.swarm.electors(), KEYS.sign)
    other.grow(1)
    assert other.whole.chain != log.whole.chain
    again = log.open("peer", is_ledger=False)
    assert again.adopt(other.whole.epoch_record)
    again.accept(*other.entries[2])
    assert again.state.root() == other.whole.state.root()
    for each in (again, log.whole, other.whole):
        each.store.close()


def test_an_older_epoch_changes_nothing(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    older = replica.epoch_record
    replica.open_epoch(swarm.electors(), KEYS.sign)
    before = replica.standing
    assert replica.adopt(older)
    assert replica.standing is before


# Memory: the next state takes the place of the one before


def test_a_peer_keeps_the_parameters_before_and_a_ledger_neither(tmp_path: Path) -> None:
    for is_ledger in (True, False):
        replica = open_replica(tmp_path / str(is_ledger), KEYS, is_ledger=is_ledger)
        swarm = kit.Swarm()
        replica.open_epoch(swarm.electors(), KEYS.sign)
        before, params_N = replica.state, replica.state.params_N.clone()
        take(replica, swarm)
        assert replica.state.memory_M.data_ptr() == before.memory_M.data_ptr()
        assert before.params_N.equal(params_N) is not is_ledger


def test_a_state_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    replica, swarm = open_replica(tmp_path, KEYS), kit.Swarm()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    with replica.state.kept():
        before, root = replica.state, replica.state.root()
        take(replica, swarm)
        again = OuterState.genesis(before.layout, before.params_N, before.memory_M)
        assert again.root() == root


@pytest.mark.parametrize("is_ledger", [True, False])
def test_beside_a_state_that_is_read_the_next_takes_the_update(
    tmp_path: Path, is_ledger: bool
) -> None:
    replica, swarm = open_replica(tmp_path, KEYS, is_ledger=is_ledger), kit.Swarm()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, body = swarm.entry(replica.run_id, replica.head)
    update_F = replica.replay.decode(entry, body)
    assert isinstance(update_F, torch.Tensor)
    with replica.state.kept():
        replica.accept(replica.check(entry, swarm.certify(entry)), body, update_F)
    assert replica.state.params_N.data_ptr() == update_F.data_ptr()
    replica.store.close()


def test_a_disk_that_takes_no_more_leaves_the_state(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, swarm = reopen(), kit.Swarm()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    before = OuterState.genesis(
        replica.layout, replica.state.params_N.clone(), replica.state.memory_M.clone()
    )

    def full(**_: Any) -> bool:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(replica.store, "append", full)
        with pytest.raises(OSError, match="No space"):
            take(replica, swarm)
    assert (replica.position, replica.state.root()) == (0, before.root())
    take(replica, swarm)
    assert replica.position == replica.state.position == 1


def test_a_ledger_whose_update_does_not_decode_halfway_takes_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, swarm = open_replica(tmp_path, KEYS), kit.Swarm()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    take(replica, swarm)
    decode_by_runs = Cells.decode_by_runs

    def broken(cells: Cells, *args: Any) -> Iterator[Any]:
        yield from decode_by_runs(cells, *args)
        raise UpdateError("chunk 1: flipped in memory")

    monkeypatch.setattr(Cells, "decode_by_runs", broken)
    take(replica, swarm)
    assert "flipped in memory" in replica.diverged
    assert replica.position == 2  # the log goes on
    assert replica.state.position == 0
    assert replica.state.root() == kit.genesis().root()


def test_a_peer_resumes_behind_newer_snapshots_that_cannot_be_read(tmp_path: Path) -> None:
    """Those that it writes on the way are older, so each is pruned as soon as it is there."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=KEYS)
    peer = log.open("peer", is_ledger=False)
    peer.adopt(log.whole.epoch_record)
    for _ in range(12):
        log.grow(1)
        peer.accept(*log.entries[-1])
        peer.save_due()
    peer.store.close()
    for path in (tmp_path / "peer").glob("snapshot-*[1-9]*.bin"):
        path.write_bytes(b"damaged")
    again = log.open("peer", is_ledger=False)
    assert again.resume()
    assert again.head == log.whole.head and again.state.root() == log.whole.state.root()
    for each in (again, log.whole):
        each.store.close()
