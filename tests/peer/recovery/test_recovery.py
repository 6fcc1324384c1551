"""What recovery does about donors that fail, freeze or lie."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Entry
from atoll.optim.log.live_replica import LiveReplica, Recovered
from atoll.optim.state import vectors
from atoll.peer.recovery.errors import NoDonor
from atoll.peer.recovery.leaves import Leaves
from atoll.peer.recovery.recovery import Recovery
from atoll.peer.recovery.sources import Source
from atoll.peer.rounds.messages import Decided, Head
from support import kit
from support.logs import Log, LogSource

STALL_S = 0.2


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Nine entries; a peer comes after the first."""
    log = Log(tmp_path, swarm=kit.Swarm(), keys=RunKeys.generate())
    log.grow(1)
    log.late = log.open("late", is_ledger=False)
    log.late.adopt(log.whole.epoch_record)
    log.late.accept(*log.entries[0])
    log.grow(8)
    yield log
    log.whole.store.close()
    log.late.store.close()


def recover(log: Log, *sources: Source) -> tuple[Recovered | None, list[str]]:
    """Recover the late peer; what it did, and what it warned of."""
    told: list[str] = []

    async def listed() -> Iterator[Sequence[Source]]:
        return iter([sources])

    async def main() -> Recovered | None:
        recovery = Recovery(
            LiveReplica(log.late, compute=asyncio.to_thread),
            listed,
            genesis=asyncio.Event().wait,
            stall_s=STALL_S,
            on_event=lambda level, text: told.append(text),
            on_progress=lambda what, left: None,
        )
        return await asyncio.wait_for(recovery.run(), 20.0)

    return asyncio.run(main()), told


def expect_caught_up(log: Log) -> None:
    assert log.late.head == log.whole.head
    assert log.late.state.root() == log.whole.state.root()
    assert log.late.electorate == log.whole.electorate


def donor(log: Log, name: str, *, kind: type[LogSource] = LogSource) -> LogSource:
    return kind(log, name=name, first_body=6, snapshots=(6, 8))


class BreaksOff(LogSource):
    """Goes away after one leaf of a snapshot."""

    async def leaves(self, position: int, indices: Sequence[int]) -> AsyncIterator[Any]:
        async for leaf in super().leaves(position, indices[:1]):
            await asyncio.sleep(0.01)  # the others have nothing left to ask for
            yield leaf
        raise PeerUnreachable("it is gone")


class Freezes(LogSource):
    """Never answers."""

    async def head(self) -> Head:
        await asyncio.Event().wait()
        raise AssertionError


class Forges(LogSource):
    """Sends an entry of its own."""

    async def headers(self, start: int, stop: int) -> list[Decided]:
        sent = await super().headers(start, stop)
        entry = Entry.decode(sent[-1].entry).model_copy(update={"lr": 0.0})
        return [*sent[:-1], Decided(entry=entry.encode(), certificate=sent[-1].certificate)]


class SendsOtherBodies(LogSource):
    """Sends bodies of the right length."""

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        into[:] = bytes(len(into))


class Advances(LogSource):
    """Tells of entries up to a position, and of two more once it has been asked for `after`."""

    told, after = 7, 6
    is_asked: threading.Event
    """for a body that it did not tell of at first"""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_asked = threading.Event()
        self.headers_from = list[int]()

    async def head(self) -> Head:
        return (await super().head()).model_copy(update={"position": self.told})

    async def headers(self, start: int, stop: int) -> list[Decided]:
        self.headers_from.append(start)
        return await super().headers(start, stop)

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        await super().body(position, start, into)
        if position == self.after:
            self.told = 9
        if position == 7:
            self.is_asked.set()


def waits_for(asked: threading.Event, work: Any, when: Any = lambda *given: True) -> Any:
    def waiting(*given: Any) -> Any:
        assert not when(*given) or asked.wait(10.0)
        return work(*given)

    return waiting


def test_leaves_of_a_failed_donor_are_asked_of_others(log: Log) -> None:
    first, second = donor(log, "a", kind=BreaksOff), donor(log, "b")
    recovered, told = recover(log, first, second)
    assert recovered is not None and recovered.snapshot_position == 6
    assert set(recovered.donors) >= {"a", "b"}
    assert told == ["snapshot 6 of a: it is gone"]
    expect_caught_up(log)


def test_a_snapshot_that_no_donor_completes(log: Log) -> None:
    with pytest.raises(NoDonor):
        recover(log, donor(log, "a", kind=BreaksOff))
    assert log.late.position == 1


def test_a_frozen_donor_is_not_waited_for(log: Log) -> None:
    recovered, _ = recover(log, donor(log, "a", kind=Freezes), donor(log, "b"))
    assert recovered is not None and recovered.donors == ("b",)
    expect_caught_up(log)


def test_entries_are_not_applied_beside_a_state_that_is_still_written(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next state would take as much memory again."""
    memories, write, accept = set[int](), log.late.store.write_snapshot, log.late.accept

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return write(*given, **named)

    def observed(*given: Any) -> Any:
        update = accept(*given)
        memories.add(log.late.state.memory_M.data_ptr())
        return update

    monkeypatch.setattr(log.late.store, "write_snapshot", slowly)
    monkeypatch.setattr(log.late, "accept", observed)
    recovered, _ = recover(log, LogSource(log, name="a", first_body=0, snapshots=()))
    assert recovered is not None and recovered.entries == 8
    assert len(memories) == 1
    expect_caught_up(log)


def test_bodies_come_while_the_state_before_them_is_put_in_place(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the link idles while the state is hashed and written."""
    asked, install = threading.Event(), log.late.install

    class TellsOfBodies(LogSource):
        async def body(
            self, position: int, start: int, into: memoryview, *, gives_way: bool = False
        ) -> None:
            asked.set()
            await super().body(position, start, into)

    def waiting(*given: Any) -> Any:
        assert asked.wait(10.0)
        return install(*given)

    monkeypatch.setattr(log.late, "install", waiting)
    recovered, told = recover(log, donor(log, "a", kind=TellsOfBodies))
    assert recovered is not None and recovered.snapshot_position == 6 and told == []
    expect_caught_up(log)


def test_later_entries_come_while_the_last_one_is_applied(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the link idles until the next look."""
    source = Advances(log, name="a", first_body=0, snapshots=())
    slow = waits_for(source.is_asked, log.late.accept, lambda claim, body: claim.entry.position > 5)
    monkeypatch.setattr(log.late, "accept", slow)
    recovered, told = recover(log, source)
    assert recovered is not None and (recovered.entries, recovered.donors) == (8, ("a",))
    assert source.headers_from == [1, 7] and told == []
    expect_caught_up(log)


def test_an_epoch_that_opens_meanwhile_is_no_fault_of_the_donor(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It voids the last entries under way, so what comes after them there has another chain."""
    accept, turned = log.late.accept, asyncio.Event()
    turn = log.open("turn")
    turn.adopt(log.whole.epoch_record)
    for claim, body in log.entries[:5]:
        turn.accept(claim, body)
    turn.open_epoch(log.swarm.electors(), log.keys.sign)

    class Turns(Advances):
        async def head(self) -> Head:
            head = await super().head()
            if self.told == 9:  # it has heard of the epoch
                turned.set()
                return head.model_copy(
                    update={"epoch": turn.epoch, "epoch_record": turn.epoch_record}
                )
            return head

    def slowly(claim: Any, body: Any) -> Any:
        if claim.entry.position == 6:
            time.sleep(0.3)
        return accept(claim, body)

    monkeypatch.setattr(log.late, "accept", slowly)
    source = Turns(log, name="a", first_body=0, snapshots=())
    with contextlib.suppress(NoDonor, TimeoutError):  # nobody here has the entries of the epoch
        recover(log, source)
    assert turned.is_set() and log.late.epoch == turn.epoch
    assert 7 not in source.headers_from
    turn.store.close()


def test_commits_that_come_while_donors_are_asked_are_not_fetched(log: Log) -> None:
    fetched = list[int]()

    async def main() -> None:
        live = LiveReplica(log.late, compute=asyncio.to_thread)

        class Commits(Advances):
            async def head(self) -> Head:
                if self.told == 9:
                    for claim, body in log.entries[live.position : 8]:
                        await live.accept_claim(claim, body)
                return await super().head()

            async def body(self, position: int, *given: Any, **named: Any) -> None:
                fetched.append(position)
                await super().body(position, *given, **named)

        source = Commits(log, name="a", first_body=0, snapshots=())

        async def listed() -> Iterator[Sequence[Source]]:
            return iter([[source]])

        recovery = Recovery(
            live,
            listed,
            genesis=asyncio.Event().wait,
            stall_s=STALL_S,
            on_event=lambda level, text: None,
            on_progress=lambda what, left: None,
        )
        await asyncio.wait_for(recovery.run(), 20.0)

    asyncio.run(main())
    assert fetched == [*range(1, 7), 8]
    expect_caught_up(log)


def test_a_donor_that_forges_later_entries_is_left_for_another(log: Log) -> None:
    class ForgesLater(Advances):
        async def headers(self, start: int, stop: int) -> list[Decided]:
            sent = await super().headers(start, stop)
            other = Decided(entry=sent[-1].entry, certificate=sent[0].certificate)
            return [*sent[:-1], other] if start > 1 else sent

    liar = ForgesLater(log, name="a", first_body=0, snapshots=())
    honest = Advances(log, name="b", first_body=0, snapshots=())
    liar.after = honest.after = 0  # of an entry that is here: they tell all from the next look on
    honest.told = 6

    async def slow_body(position: int, start: int, into: memoryview, **named: Any) -> None:
        await Advances.body(honest, position, start, into, **named)
        honest.told = liar.told = 9

    honest.body = slow_body  # type: ignore[method-assign]
    recovered, told = recover(log, liar, honest)
    assert recovered is not None and recovered.to_position == 9
    assert 7 in liar.headers_from and 7 in honest.headers_from and told == []
    expect_caught_up(log)


def test_a_state_that_came_is_let_go_with_the_first_entry_after_it(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held on, its parameters would take 4 bytes a parameter beside those after it."""
    apply, came, held = Recovery._apply, list[weakref.ref[Any]](), list[bool]()
    fetch = Leaves.fetch

    async def fetching(leaves: Leaves, *given: Any, **more: Any) -> Any:
        state = await fetch(leaves, *given, **more)
        came.append(weakref.ref(state))
        return state

    async def applying(recovery: Recovery, *given: Any) -> None:
        await apply(recovery, *given)
        held.append(came[0]() is not None)

    monkeypatch.setattr(Leaves, "fetch", fetching)
    monkeypatch.setattr(Recovery, "_apply", applying)
    recover(log, donor(log, "a"))
    expect_caught_up(log)
    assert len(held) >= 2 and not any(held[1:])


def test_a_body_that_nobody_gives_leaves_the_state_that_came(log: Log) -> None:
    class GivesNoBody(LogSource):
        async def body(
            self, position: int, start: int, into: memoryview, *, gives_way: bool = False
        ) -> None:
            raise PeerUnreachable("it is gone")

    with pytest.raises(NoDonor):
        recover(log, donor(log, "a", kind=GivesNoBody))
    assert log.late.position == 6


def test_what_a_recovery_left_in_the_heap_goes_back(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = list[int]()
    monkeypatch.setattr(vectors, "trim", trimmed.append)
    recover(log, donor(log, "a"))
    assert trimmed == [kit.LAYOUT.numel]


def test_a_donor_that_forges_entries_is_left_for_another(log: Log) -> None:
    recovered, told = recover(log, donor(log, "a", kind=Forges), donor(log, "b"))
    assert recovered is not None
    assert told and all(text.startswith("recovery from a: ") for text in told)
    expect_caught_up(log)


def test_a_donor_that_sends_other_bodies_is_left_for_another(log: Log) -> None:
    recovered, told = recover(log, donor(log, "a", kind=SendsOtherBodies), donor(log, "b"))
    assert recovered is not None
    assert told and all("has another digest" in text for text in told)
    expect_caught_up(log)


def test_entries_without_a_body_are_a_recovery_too(log: Log) -> None:
    """Somebody waits to be told; nobody gave any bytes but headers."""
    log.late.store.close()
    log.late = log.open("later", is_ledger=False)
    log.late.adopt(log.whole.epoch_record)
    for claim, body in log.entries:
        log.late.accept(claim, body)
    entry = log.swarm.null(log.run_id, log.whole.head)
    claim = log.whole.check(entry, log.swarm.certify(entry))
    log.whole.accept(claim, b"")
    log.entries.append((claim, b""))
    recovered, _ = recover(log, LogSource(log, name="a", first_body=0, snapshots=()))
    assert recovered is not None
    assert (recovered.entries, recovered.donors) == (1, ("a",))
    expect_caught_up(log)
