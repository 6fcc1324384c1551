"""Orders of the organiser's: what follows what, and logs that hold some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.dht.identity import Identity
from atoll.optim.log.claims import place_before
from atoll.optim.log.entry import MAX_SETTINGS, ChainMismatch, Entry, MalformedRecord
from atoll.optim.log.module import log_id
from atoll.optim.log.orders import (
    MAX_EVICTED,
    MAX_PENDING,
    NUMBERS,
    Change,
    EvictPeer,
    Order,
    OrderBook,
    OrderInvalid,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RotateKey,
    RunSettings,
    SetCodec,
    SetInnerScale,
    SetInnerSteps,
    SetOuterMomentum,
    SetOuterRate,
    StopRun,
    described,
    read_settings,
    sign_order,
)
from atoll.optim.log.replay import Replay, with_codec
from atoll.optim.log.replica import Replica
from atoll.optim.reducer import Course
from atoll.optim.reduction.cells import UpdateError
from support import kit
from support.logs import RUN, open_replica, take

KEYS = RunKeys.generate()
PEERS = [Identity.ephemeral().peer_id for _ in range(MAX_EVICTED)]


def order(number: int, change: Change, **changes: Any) -> Order:
    return Order(**{"run_id": RUN, "number": number, "change": change} | changes)


def signed(number: int, change: Change, keys: RunKeys = KEYS, **changes: Any) -> bytes:
    return sign_order(order(number, change, **changes), keys.sign)


def after(*changes: Change, position: int = 9) -> RunSettings:
    settings = RunSettings()
    for number, change in enumerate(changes, 1):
        settings = settings.after(order(number, change), position)
    return settings


# Settings


def test_settings_follow_from_the_orders_alone() -> None:
    settings = after(SetInnerSteps(value=50), SetOuterRate(value=0.5), SetInnerSteps(value=60))
    assert settings == RunSettings(number=3, inner_steps=60, outer_lr=0.5)
    assert read_settings(settings.stored) == settings


def test_a_run_without_orders_stores_nothing() -> None:
    assert RunSettings().stored == b""
    assert read_settings(b"") == RunSettings()
    assert RunSettings().course == Course()
    assert RunSettings().scalars(0.5, 0.25) == (0.5, 0.25)


def test_a_resume_ends_a_pause_and_a_planned_stop() -> None:
    assert after(PauseRun()).is_paused
    assert not after(PauseRun(), ResumeRun()).is_paused
    assert after(StopRun(after_round=40)).last_round == 40
    assert after(StopRun(after_round=40), ResumeRun()).last_round is None


@pytest.mark.parametrize(("named", "last"), [(None, 10), (3, 10), (10, 10), (11, 11)])
def test_a_run_stops_with_the_order_at_the_earliest(named: int | None, last: int) -> None:
    assert after(PauseRun(), StopRun(after_round=named), position=9).last_round == last
    assert after(PauseRun(), StopRun(after_round=named), position=9).is_paused == (last > 10)


def test_the_outer_step_takes_fp32_values() -> None:
    settings = after(SetOuterRate(value=0.1), SetOuterMomentum(value=0.3))
    lr, momentum = settings.scalars(0.5, 0.5)
    assert (lr, momentum) == pytest.approx((0.1, 0.3))
    assert (lr, momentum) != (0.1, 0.3)


def test_a_course_shortens_a_run_and_never_lengthens_it() -> None:
    assert [Course(last_round=n).rounds(20) for n in (None, 8, 20, 30)] == [20, 8, 20, 20]
    assert [Course(last_round=n).rounds(0) for n in (None, 8)] == [0, 8]
    assert after(SetInnerScale(value=0.5)).course == Course(inner_scale=0.5)
    assert Course(inner_steps=7).window(30) == 7 and Course().window(30) == 30


@pytest.mark.parametrize("number", [0, 2])
def test_an_order_out_of_its_turn_is_refused(number: int) -> None:
    settings = after(PauseRun())
    with pytest.raises(OrderInvalid, match="expected order 2"):
        settings.after(order(number + 1 if number else 1, ResumeRun()), 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner_steps", 0),
        ("inner_steps", 10**7),
        ("inner_steps", 2.5),
        ("outer_lr", 0.0),
        ("outer_lr", float("nan")),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("inner_scale", float("inf")),
        ("min_peers", 0),
        ("min_peers", 10**6),
    ],
)
def test_a_number_out_of_its_range_is_no_order(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="value"):
        NUMBERS[name](value=value)


def test_an_order_is_told_in_a_line() -> None:
    assert described(order(3, PauseRun())) == "order 3: the run is paused"
    assert described(order(4, StopRun(after_round=9))) == "order 4: the run ends after round 9"
    assert described(order(5, SetInnerSteps(value=7))) == "order 5: inner_steps is 7 from here on"


def test_an_evicted_peer_is_named_until_it_is_readmitted() -> None:
    evict = [EvictPeer(peer_id=peer) for peer in PEERS[:2]]
    assert after(*evict, evict[0]).evicted == tuple(sorted(PEERS[:2]))
    assert after(*evict, ReadmitPeer(peer_id=PEERS[0])).evicted == (PEERS[1],)
    assert after(ReadmitPeer(peer_id=PEERS[0])).evicted == ()
    assert read_settings(after(*evict).stored) == after(*evict)


def test_settings_that_evict_nobody_keep_their_bytes() -> None:
    """A log of before there were evictions is read, and goes on."""
    settings = after(PauseRun())
    assert "evicted" not in settings.model_dump()
    back = after(PauseRun(), EvictPeer(peer_id=PEERS[0]), ReadmitPeer(peer_id=PEERS[0]))
    assert back.stored == settings.model_copy(update={"number": 3}).stored


def test_settings_name_so_many_evicted_peers_and_fit_into_an_entry() -> None:
    settings = RunSettings(number=1, evicted=tuple(sorted(PEERS)))
    assert len(settings.stored) < MAX_SETTINGS
    with pytest.raises(OrderInvalid, match="at most 64 evicted"):
        settings.after(order(2, EvictPeer(peer_id=Identity.ephemeral().peer_id)), 9)


def test_a_codec_is_a_setting_and_not_a_number() -> None:
    settings = after(SetCodec(value="int4"))
    assert settings.course.codec == settings.codec == "int4"
    assert settings.numbers == {}
    assert read_settings(settings.stored) == settings
    assert "codec" not in after(PauseRun()).model_dump()
    assert described(order(1, SetCodec(value="int4"))) == "order 1: the codec is int4 from here on"


def test_a_log_whose_codec_changes_replays_to_the_same_bits(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    go_on(replica, swarm)
    longest = replica.replay.cells_at(1).max_body_bytes(1)
    give(replica, swarm, SetCodec(value="int4"))
    assert replica.replay.cells_at(2).max_body_bytes(1) < 0.6 * longest
    with pytest.raises((MalformedRecord, UpdateError)):
        go_on(replica, swarm)  # int8, as before
    swarm.replay = Replay(with_codec(kit.REPLAY.method, "int4"), kit.LAYOUT)
    go_on(replica, swarm)
    give(replica, swarm, SetOuterRate(value=0.25))
    go_on(replica, swarm, lr=0.25)
    state, head = replica.state.root(), replica.head
    replica.store.close()
    again = reopen()
    assert (again.state.root(), again.head) == (state, head)


def test_an_entry_that_names_no_codec_is_malformed(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    stored = RunSettings(number=1, codec="gzip").stored
    entry, _ = swarm.entry(RUN, replica.head, settings=stored)
    with pytest.raises(MalformedRecord, match="expected one of the codecs"):
        replica.replay.check(entry)


@pytest.mark.parametrize("peer_id", ["", "laptop", "0" * 52, "1" * 200, "12D3KooW\n" + "1" * 44])
def test_what_is_no_peer_id_is_not_evicted(peer_id: str) -> None:
    with pytest.raises(ValueError, match="peer_id"):
        EvictPeer(peer_id=peer_id)


# The book


def test_a_book_gives_orders_in_a_row() -> None:
    book = OrderBook()
    for number in (3, 1, 2, 5):
        assert book.add(signed(number, PauseRun()), order(number, PauseRun()))
    assert not book.add(signed(3, PauseRun()), order(3, PauseRun()))
    assert book.after(0) == [signed(number, PauseRun()) for number in (1, 2, 3)]
    assert book.next(2) == signed(3, PauseRun())
    assert book.next(3) is None
    assert book.next(0) is None  # those before were dropped


def test_of_two_orders_of_one_number_the_newer_counts() -> None:
    """A coordinator that was restored from a copy may give a number again."""
    book = OrderBook()
    book.add(signed(1, PauseRun()), order(1, PauseRun()))
    assert book.add(signed(1, ResumeRun()), order(1, ResumeRun()))
    assert book.next(0) == signed(1, ResumeRun())


def test_a_book_gives_a_bounded_number_of_orders() -> None:
    book = OrderBook()
    for number in range(1, 2 * MAX_PENDING):
        book.add(signed(number, PauseRun()), order(number, PauseRun()))
    assert len(book.after(0)) == MAX_PENDING


# In a log


Open = Callable[..., Replica]


@pytest.fixture(params=[True, False], ids=["ledger", "peer"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    opened: list[Replica] = []

    def open_again(folder: str = "log") -> Replica:
        opened.append(open_replica(tmp_path / folder, KEYS, is_ledger=request.param))
        return opened[-1]

    yield open_again
    for replica in opened:
        replica.store.close()


@pytest.fixture
def swarm() -> kit.Swarm:
    return kit.Swarm()


def give(
    replica: Replica, swarm: kit.Swarm, change: Change, keys: RunKeys = KEYS, **changes: Any
) -> Entry:
    """Let the swarm decide the next order."""
    before = replica.settings
    record = signed(before.number + 1, change, keys)
    settings = before.after(replica.open_order(record, before.key), replica.position).stored
    control = {"kind": "control", "members": (), "parts": (), "order": record}
    entry, _ = swarm.entry(replica.run_id, replica.head, **control, settings=settings, **changes)
    replica.accept(replica.check(entry, swarm.certify(entry)), b"")
    replica.save_due()
    return entry


def records_of(replica: Replica) -> list[tuple[bytes, bytes]]:
    stored = replica.store.headers(0, replica.position)
    return [(record.entry, record.certificate) for record in stored]


def go_on(replica: Replica, swarm: kit.Swarm, **changes: Any) -> Entry:
    stored = replica.standing.settings
    assert stored is not None
    return take(replica, swarm, settings=stored, **changes)


def test_an_order_leaves_the_state_as_it_is(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    go_on(replica, swarm)
    before = replica.state.root()
    give(replica, swarm, SetInnerSteps(value=7))
    assert replica.position == replica.state.position == 2
    assert replica.state.root() == before
    assert replica.electorate == swarm.electors()
    assert replica.settings == RunSettings(number=1, inner_steps=7)


def test_a_log_with_orders_replays_to_the_same_bits(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    go_on(replica, swarm)
    give(replica, swarm, SetOuterRate(value=0.25))
    go_on(replica, swarm, lr=0.25)
    give(replica, swarm, PauseRun())
    give(replica, swarm, ResumeRun())
    go_on(replica, swarm, lr=0.25)
    state, standing = replica.state.root(), replica.standing
    replica.store.close()
    again = reopen()
    assert again.state.root() == state
    assert (again.settings, again.head) == (replica.settings, standing.head)


def test_a_replica_that_begins_at_a_snapshot_knows_the_settings(
    reopen: Open, swarm: kit.Swarm
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    give(replica, swarm, SetInnerSteps(value=7))
    go_on(replica, swarm)
    claims = replica.verify(records_of(replica), None)
    place = place_before(claims, 2, replica.opened)
    assert place is not None and place.settings == replica.standing.settings
    unknown = place_before(claims[1:], 1, None)
    assert unknown is not None and unknown.settings is None


def test_an_epoch_carries_the_settings_at_its_base(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    give(replica, swarm, SetInnerSteps(value=7))
    opened = replica.open_epoch(swarm.electors(), KEYS.sign)
    assert (
        read_settings(opened.settings) == replica.settings == RunSettings(number=1, inner_steps=7)
    )
    go_on(replica, swarm)
    assert replica.settings.inner_steps == 7


def test_nothing_but_an_order_follows_a_pause(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    give(replica, swarm, PauseRun())
    for changes in ({}, {"kind": "null", "members": (), "parts": ()}):
        with pytest.raises(OrderInvalid, match="paused"):
            go_on(replica, swarm, **changes)
    give(replica, swarm, ResumeRun())
    go_on(replica, swarm)


def test_nothing_follows_the_last_round(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    give(replica, swarm, StopRun(after_round=2))
    go_on(replica, swarm)
    with pytest.raises(OrderInvalid, match="ended after round 2"):
        go_on(replica, swarm)
    with pytest.raises(OrderInvalid, match="ended after round 2"):
        give(replica, swarm, ResumeRun())


def test_settings_that_do_not_follow_are_refused(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    with pytest.raises(OrderInvalid, match="settings that follow"):
        take(replica, swarm, settings=RunSettings(number=1, inner_steps=7).stored)
    give(replica, swarm, SetInnerSteps(value=7))
    with pytest.raises(OrderInvalid, match="settings that follow"):
        take(replica, swarm, settings=b"")


def test_an_entry_that_was_checked_is_checked_again_when_its_body_came(
    reopen: Open, swarm: kit.Swarm
) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    entry, body = swarm.entry(RUN, replica.head)
    claim = replica.check(entry, swarm.certify(entry))
    replica.standing = replace(
        replica.standing, settings=RunSettings(number=1, is_paused=True).stored
    )
    with pytest.raises(OrderInvalid):
        replica.accept(claim, body)


def test_no_round_has_an_evicted_member(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    out = swarm.identities[2].peer_id
    left = tuple(e for e in swarm.electors() if e.peer_id != out)
    give(replica, swarm, EvictPeer(peer_id=out), electorate=left)
    with pytest.raises(OrderInvalid, match="is a member, but was evicted"):
        go_on(replica, swarm)
    give(replica, swarm, ReadmitPeer(peer_id=out), electorate=left)
    go_on(replica, swarm)


def test_an_order_under_another_key_is_refused(reopen: Open) -> None:
    replica = reopen()
    with pytest.raises(OrderInvalid, match="signature of the organiser's key"):
        replica.open_order(signed(1, PauseRun(), RunKeys.generate()), None)
    with pytest.raises(MalformedRecord):
        replica.open_order(b"no order", None)


def test_from_a_rotation_on_the_new_key_signs_and_a_replay_agrees(
    reopen: Open, swarm: kit.Swarm, tmp_path: Path
) -> None:
    replica, newer, newest = reopen(), RunKeys.generate(), RunKeys.generate()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    go_on(replica, swarm)
    give(replica, swarm, RotateKey(value=newer.run_public_key))
    assert replica.settings.key == newer.run_public_key
    with pytest.raises(OrderInvalid, match="signature of the organiser's key"):
        give(replica, swarm, PauseRun())  # of the old key
    with pytest.raises(OrderInvalid, match="signature of the organiser's key"):
        give(replica, swarm, PauseRun(), newest)
    give(replica, swarm, SetInnerSteps(value=7), newer)
    give(replica, swarm, RotateKey(value=newest.run_public_key), newer)
    with pytest.raises(OrderInvalid, match="signature of the organiser's key"):
        give(replica, swarm, PauseRun(), newer)
    give(replica, swarm, SetInnerSteps(value=9), newest)
    go_on(replica, swarm)

    # A peer that was away meets all of it in the log, and has the same bits.
    other = open_replica(tmp_path / "away", KEYS)
    other.adopt(replica.epoch_record)
    for (entry, certificate), claim in zip(
        records_of(replica), other.verify(records_of(replica), None), strict=True
    ):
        assert (claim.entry.encode(), claim.certificate.encode()) == (entry, certificate)
        other.accept(claim, replica.store.body(claim.entry.position))
    assert other.chain == replica.chain and other.state.root() == replica.state.root()
    other.store.close()
    again = reopen()
    assert again.settings == other.settings == replica.settings
    assert again.state.root() == replica.state.root()
    assert again.settings.key == newest.run_public_key


def test_orders_that_came_before_theirs_wait_for_the_key_that_signs_them() -> None:
    newer, book = RunKeys.generate(), OrderBook()
    rotation = RotateKey(value=newer.run_public_key)
    here = RunSettings(number=4, key=b"k" * 32)
    assert book.key_before(5, here) == book.key_before(7, here) == b"k" * 32
    book.add(signed(5, rotation), order(5, rotation))
    assert book.key_before(5, here) == b"k" * 32
    assert book.key_before(6, here) == book.key_before(7, here) == newer.run_public_key
    assert book.key_before(6, RunSettings(number=5)) is None  # the log took another one
    book.drop(5)
    assert book.next(4) is None


def test_an_order_of_another_run_is_refused(reopen: Open) -> None:
    replica = reopen()
    with pytest.raises(OrderInvalid, match="another"):
        replica.open_order(signed(1, PauseRun(), run_id=b"s" * 32), None)


def test_each_log_of_a_run_takes_its_orders(tmp_path: Path) -> None:
    replica = open_replica(tmp_path, KEYS)
    replica.module = replace(replica.module, run_id=log_id(RUN, "stage-2"), name="stage-2")
    assert replica.open_order(signed(1, PauseRun()), None).change == PauseRun()
    with pytest.raises(OrderInvalid, match="another"):
        replica.open_order(signed(1, PauseRun(), run_id=replica.run_id), None)
    replica.store.close()


def test_an_entry_has_an_order_if_it_is_a_control_entry(swarm: kit.Swarm) -> None:
    head = open_head()
    for changes in (
        {"order": signed(1, PauseRun())},
        {"kind": "control", "members": (), "parts": ()},
        {"kind": "control", "order": signed(1, PauseRun())},
    ):
        with pytest.raises(ValueError, match=r"neither|none"):
            swarm.entry(RUN, head, **changes)


def test_an_entry_without_orders_keeps_its_bytes(swarm: kit.Swarm) -> None:
    """A log of a run that was never given an order can be read by what wrote it."""
    entry, _ = swarm.entry(RUN, open_head())
    assert not {"order", "settings"} & set(entry.model_dump())
    record = entry.encode()
    assert Entry.decode(record) == entry
    explicit = Entry.model_construct(**dict(entry)).model_dump()
    assert list(explicit) == list(entry.model_dump())


def open_head() -> Any:
    from atoll.optim.log.store import StoreHead

    return StoreHead(epoch=0, position=0, chain=bytes(32))


def test_a_chain_breaks_where_an_order_is_left_out(reopen: Open, swarm: kit.Swarm) -> None:
    replica = reopen()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    go_on(replica, swarm)
    give(replica, swarm, PauseRun())
    give(replica, swarm, ResumeRun())
    records = records_of(replica)
    with pytest.raises(ChainMismatch):
        replica.verify([records[0], records[2]], None)
