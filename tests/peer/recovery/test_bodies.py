"""Bodies of missed entries come ahead of their turn, from several donors, and never too many."""

import asyncio
from dataclasses import dataclass, field

import pytest

from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Elector, Entry, Member, Part, sha256
from atoll.peer.recovery import bodies
from atoll.peer.recovery.bodies import BODIES_AHEAD, PIECE_BYTES, STREAMS, Bodies, pieces
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.recovery.paces import Paces
from atoll.peer.recovery.sources import ASK_AGAIN_S, Donor
from atoll.peer.rounds.messages import Head

FETCH_S = 1.0


def body_of(position, sizes):
    """Other bytes for each part of each entry."""
    return b"".join(bytes([(position + index) % 251]) * size for index, size in enumerate(sizes))


def entry(position, *sizes):
    """An entry whose parts have these sizes, by default one of a hundred bytes."""
    sizes = sizes or (100,)
    member = Member(
        peer_id="a", incarnation="0", weight=1.0, clip=1.0, norm=1.0, tokens=1, steps=1, loss=None
    )
    parts, body = [], body_of(position, sizes)
    for index, size in enumerate(sizes):
        start = sum(sizes[:index])
        parts.append(
            Part(
                start_cell=index,
                stop_cell=index + 1,
                owner=0,
                generation=0,
                wire_bytes=size,
                digest=sha256(body[start : start + size]),
            )
        )
    return Entry(
        run_id=bytes(32),
        epoch=0,
        position=position,
        kind="update",
        previous_chain=bytes(32),
        fragment=0,
        lr=1.0,
        momentum=0.0,
        members=(member,),
        parts=tuple(parts),
        electorate=(Elector(peer_id="a", incarnation="0"),),
    )


@dataclass(kw_only=True, eq=False)
class SlowSource:
    """Gives any bytes after a second, if it gives any."""

    name: str
    gives: bool = True
    lies: bool = False
    sizes: tuple[int, ...] = (100,)
    took_s: float = FETCH_S
    in_round_s: float = 0.0
    under_way: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    most: int = 0
    gave_way: int = 0

    async def body(self, position, start, into, *, gives_way=False):
        if gives_way and asyncio.get_running_loop().time() < self.in_round_s:
            self.gave_way += 1
            raise GaveWay("training waits for a round", peer=self.name)
        self.asked.append(position)
        self.under_way.append(position)
        self.most = max(self.most, len(self.under_way))
        try:
            await asyncio.sleep(self.took_s)
        finally:
            self.under_way.remove(position)
        if not self.gives:
            raise PeerUnreachable("gone", peer=self.name)
        if self.lies:
            into[:] = bytes([255]) * len(into)
        else:
            into[:] = body_of(position, self.sizes)[start : start + len(into)]


def donor(source, position=100, first_body=0):
    head = Head(
        protocol=1,
        epoch=0,
        position=position,
        chain=bytes(32),
        incarnation="0",
        role="trainer",
        ready_in_s=0.0,
        first_body=first_body,
        snapshots=(),
        epoch_record=b"",
    )
    return Donor(source=source, head=head)


async def at_once(function, *arguments):
    return function(*arguments)


def bodies_of(entries, donors, failures, *, gives_way=False, paces=None):
    some = Bodies(
        compute=at_once,
        paces=paces or Paces(),
        on_failure=lambda entry, donor, error: failures.append((donor.name, str(error))),
    )
    some.add(entries, donors, gives_way=gives_way)
    return some


async def take_all(entries, donors, failures, *, gives_way=False, paces=None):
    """The body of each entry, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s, taken = loop.time(), []
    async with bodies_of(entries, donors, failures, gives_way=gives_way, paces=paces) as some:
        for each in entries:
            taken.append(await some.of(each))
            assert taken[-1].data == body_of(each.position, [p.wire_bytes for p in each.parts])
    return taken, loop.time() - began_s


def test_several_are_fetched_at_once_and_given_in_order():
    async def main():
        sources = [SlowSource(name="x"), SlowSource(name="y")]
        entries = [entry(p) for p in range(7, 19)]
        taken, took_s = await take_all(entries, [donor(s) for s in sources], [])
        assert {name for each in taken for name in each.givers} == {"x", "y"}
        assert max(s.most for s in sources) == BODIES_AHEAD / 2
        assert took_s == pytest.approx(FETCH_S * len(entries) / BODIES_AHEAD)
        assert sorted(p for s in sources for p in s.asked) == [e.position for e in entries]

    run_virtual(main())


def test_a_large_body_comes_from_several_at_once():
    sizes = (PIECE_BYTES, PIECE_BYTES // 2, PIECE_BYTES // 2, 3 * PIECE_BYTES, 1)

    async def main(count):
        sources = [SlowSource(name=str(index), sizes=sizes) for index in range(count)]
        (taken,), took_s = await take_all([entry(3, *sizes)], [donor(s) for s in sources], [])
        assert taken.givers == {s.name for s in sources}
        return took_s, sorted(len(s.asked) for s in sources)

    assert run_virtual(main(1)) == (FETCH_S, [4])
    assert run_virtual(main(2)) == (FETCH_S, [2, 2])
    assert run_virtual(main(4)) == (FETCH_S, [1, 1, 1, 1])


def test_a_newcomer_takes_bodies_from_those_that_are_in_no_round():
    async def main(gives_way):
        sizes, failures = (PIECE_BYTES,) * (2 * STREAMS), []
        busy = SlowSource(name="busy", sizes=sizes, in_round_s=60.0)
        idle = SlowSource(name="idle", sizes=sizes)
        donors = [donor(busy), donor(idle)]
        _, took_s = await take_all([entry(0, *sizes)], donors, failures, gives_way=gives_way)
        assert took_s <= 6 * FETCH_S and not failures
        return len(busy.asked), len(idle.asked)

    assert run_virtual(main(gives_way=True)) == (0, 2 * STREAMS)
    assert run_virtual(main(gives_way=False)) == (STREAMS, STREAMS)


def test_one_slow_donor_is_not_asked_for_all_beside_a_round():
    async def main():
        sizes, failures = (PIECE_BYTES,) * (2 * STREAMS), []
        fast = [SlowSource(name=name, sizes=sizes, in_round_s=3.0) for name in "ab"]
        slow = SlowSource(name="slow", sizes=sizes, took_s=20.0)
        donors = [donor(source) for source in (*fast, slow)]
        await take_all([entry(0, *sizes)], donors, failures, gives_way=True)
        return len(slow.asked)

    assert run_virtual(main()) <= 4


def test_a_newcomer_asks_again_soon_where_all_are_in_a_round():
    async def main():
        failures, source = [], SlowSource(name="busy", in_round_s=7.0)
        _, took_s = await take_all([entry(0)], [donor(source)], failures, gives_way=True)
        assert 7.0 + FETCH_S <= took_s <= 7.0 + FETCH_S + ASK_AGAIN_S
        assert source.gave_way == 7.0 / ASK_AGAIN_S and not failures

    run_virtual(main())


def test_no_more_streams_at_once_than_a_link_takes():
    async def main():
        sizes = (PIECE_BYTES,) * (2 * STREAMS)
        source = SlowSource(name="x", sizes=sizes)
        _, took_s = await take_all([entry(0, *sizes)], [donor(source)], [])
        assert (source.most, took_s) == (STREAMS, 2 * FETCH_S)

    run_virtual(main())


def test_a_fast_donor_gives_more():
    async def main():
        sizes = (PIECE_BYTES,) * (4 * STREAMS)
        fast = SlowSource(name="fast", sizes=sizes)
        slow = SlowSource(name="slow", sizes=sizes, took_s=4 * FETCH_S)
        await take_all([entry(0, *sizes)], [donor(slow), donor(fast)], [])
        assert len(fast.asked) > 2 * len(slow.asked)

    run_virtual(main())


def test_a_donor_that_was_slow_holds_up_no_entry_that_is_missing_later():
    async def main():
        paces, took = Paces(), []
        sources = [SlowSource(name="fast"), SlowSource(name="slow", took_s=30.0)]
        donors = [donor(source) for source in sources]
        for position in range(12):  # one at a time, as for a peer that follows a run
            _, took_s = await take_all([entry(position)], donors, [], paces=paces)
            took.append(took_s)
        return took, len(sources[1].asked)

    took, slow = run_virtual(main())
    assert slow == 1 and took.count(FETCH_S) == 11


def test_a_donor_that_was_too_slow_to_give_is_not_the_first_next_time():
    async def main():
        paces, failures = Paces(), []
        silent = SlowSource(name="silent", took_s=60.0, gives=False)
        donors = [donor(source) for source in (silent, SlowSource(name="x"))]
        for position in range(6):
            await take_all([entry(position)], donors, failures, paces=paces)
        return len(silent.asked)

    assert run_virtual(main()) == 1


@dataclass(kw_only=True, eq=False)
class Busy(SlowSource):
    """In rounds from a time on, which a reader waits out for a minute."""

    from_s: float = 0.0
    since_s: float | None = None

    async def body(self, position, start, into, *, gives_way=False):
        now_s = asyncio.get_running_loop().time()
        has_waited = self.since_s is not None and now_s >= self.since_s + 60.0
        if gives_way and now_s >= self.from_s and not has_waited:
            self.since_s = now_s if self.since_s is None else self.since_s
            raise GaveWay("busy", peer=self.name)
        self.since_s = None
        await super().body(position, start, into)


def test_a_newcomer_does_not_wait_long_for_a_donor_that_was_fast():
    async def main():
        paces, longest = Paces(), 0.0
        sources = [Busy(name="busy", from_s=30.0), SlowSource(name="idle", took_s=10.0)]
        for position in range(30):
            donors = [donor(source) for source in sources]
            _, took_s = await take_all([entry(position)], donors, [], gives_way=True, paces=paces)
            longest = max(longest, took_s)
        return longest

    assert run_virtual(main()) <= 20.0


@dataclass(kw_only=True, eq=False)
class Line(SlowSource):
    """Takes a round trip, and then a time for each byte."""

    byte_s: float = 1e-7

    async def body(self, position, start, into, *, gives_way=False):
        self.took_s = 0.1 + len(into) * self.byte_s
        await super().body(position, start, into, gives_way=gives_way)


def test_the_last_piece_of_a_body_makes_no_donor_slow():
    async def main():
        paces, sizes = Paces(), (*(PIECE_BYTES,) * 6, 1000)
        sources = [Line(name=name, sizes=sizes) for name in "abcdef"]
        for position in range(8):
            donors = [donor(source) for source in sources]
            await take_all([entry(position, *sizes)], donors, [], paces=paces)
        return max(source.most for source in sources)

    assert run_virtual(main()) <= 2


def test_a_small_piece_makes_no_donor_slow():
    async def main():
        paces = Paces()
        sources = [Line(name="fast"), Line(name="slow", byte_s=2e-6)]
        for position in range(30):
            sizes = (1000,) if position % 3 == 2 else (PIECE_BYTES,)
            for source in sources:
                source.sizes = sizes
            donors = [donor(source) for source in sources]
            await take_all([entry(position, *sizes)], donors, [], paces=paces)
        return len(sources[1].asked)

    assert run_virtual(main()) <= 3


def test_a_donor_that_was_slow_once_is_asked_again():
    async def main():
        paces = Paces()
        sources = [SlowSource(name="a", took_s=3.0), SlowSource(name="b", took_s=9.0)]
        for position in range(95):
            await take_all([entry(position)], [donor(s) for s in sources], [], paces=paces)
            if sources[1].asked:
                sources[1].took_s = 1.0
        return len(sources[1].asked)

    assert run_virtual(main()) > 5


def test_a_donor_is_chosen_once_the_own_link_has_time_for_a_piece():
    async def main():
        one, failures = asyncio.Semaphore(1), []
        sources = [SlowSource(name="fast"), SlowSource(name="slow", took_s=20.0)]
        entries = [entry(position) for position in range(BODIES_AHEAD)]
        async with Bodies(
            compute=at_once, on_failure=failures.append, paces=Paces(), stream=lambda: one
        ) as some:
            some.add(entries, [donor(source) for source in sources])
            for each in entries:
                await some.of(each)
        return len(sources[1].asked)

    assert run_virtual(main()) == 1


def test_a_donor_that_was_away_for_long_gives_again():
    async def main():
        paces, sizes = Paces(), (PIECE_BYTES,) * (2 * STREAMS)
        for _ in range(50):
            paces.failed("back", PIECE_BYTES, 1.0)
        sources = [SlowSource(name=name, sizes=sizes) for name in ("back", "x")]
        for position in range(8):
            donors = [donor(source) for source in sources]
            await take_all([entry(position, *sizes)], donors, [], paces=paces)
        return len(sources[0].asked)

    assert run_virtual(main()) > STREAMS


@pytest.mark.parametrize("honest", [0, 1])
def test_a_quick_liar_costs_few_of_the_entries_that_are_missing_later(honest):
    async def main():
        paces = Paces()
        liar = SlowSource(name="liar", took_s=0.01, lies=not honest)
        donors = [donor(source) for source in (liar, SlowSource(name="x"))]
        for position in range(12):
            await take_all([entry(position)], donors, [], paces=paces)
            liar.lies = len(liar.asked) >= honest
        return len(liar.asked)

    assert run_virtual(main()) <= 2 + honest


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0, 0),
        (5,),
        (PIECE_BYTES + 1,),
        (1, PIECE_BYTES, 0, PIECE_BYTES - 1, 1, 1),
        (0, 3 * PIECE_BYTES, 0, 0, 2, 0),
        (1000,) * 5000,
    ],
)
def test_pieces_are_all_bytes_of_a_body_in_order(sizes):
    found = list(pieces(entry(0, *sizes) if sizes else entry(0, 0)))
    covered = [index for piece in found for index in piece.parts]
    assert covered == [*range(len(covered))] and sum(sizes[len(covered) :]) == 0
    ends = [piece.stop for piece in found]
    assert [piece.start for piece in found] == [0, *ends[:-1]][: len(ends)]
    assert (ends or [0])[-1] == sum(sizes)
    for piece in found:
        size = sum(sizes[index] for index in piece.parts)
        assert piece.stop - piece.start == size > 0
        assert size <= PIECE_BYTES or max(sizes[index] for index in piece.parts) > PIECE_BYTES


def test_a_donor_that_fails_is_told_and_another_one_gives():
    async def main():
        failures = []
        donors = [donor(SlowSource(name="x", gives=False)), donor(SlowSource(name="y"))]
        taken, _ = await take_all([entry(p) for p in range(4)], donors, failures)
        assert {name for each in taken for name in each.givers} == {"y"}
        assert failures == [("x", "gone")] * 2

    run_virtual(main())


def test_a_donor_that_fails_is_hardly_asked_afterwards():
    async def main():
        broken, failures = SlowSource(name="x", gives=False), []
        donors = [donor(broken), donor(SlowSource(name="y"))]
        await take_all([entry(p) for p in range(10 * BODIES_AHEAD)], donors, failures)
        assert len(broken.asked) == len(failures) <= STREAMS

    run_virtual(main())


def test_one_failure_is_forgotten():
    async def main():
        entries, failures = [entry(p) for p in range(10 * BODIES_AHEAD)], []
        fast, slow = SlowSource(name="fast", gives=False), SlowSource(name="slow")
        slow.took_s = 4 * FETCH_S
        loop = asyncio.get_running_loop()
        loop.call_later(1.5 * FETCH_S, setattr, fast, "gives", True)
        await take_all(entries, [donor(fast), donor(slow)], failures)
        assert {name for name, _ in failures} == {"fast"}
        assert len(fast.asked) > 3 * BODIES_AHEAD

    run_virtual(main())


def test_what_nobody_had_ahead_of_its_turn_is_asked_for_again():
    async def main():
        source, failures = SlowSource(name="x"), []
        entries = [entry(p) for p in range(3)]
        async with bodies_of(entries, [donor(source)], failures) as some:
            source.gives = False
            await asyncio.sleep(2 * FETCH_S)
            assert {name for name, _ in failures} == {"x"}
            source.gives = True
            for each in entries[:2]:
                assert (await some.of(each)).data == body_of(each.position, (100,))
            source.gives = False
            with pytest.raises(PeerUnreachable):
                await some.of(entries[2])

    run_virtual(main())


def test_who_gave_a_wrong_part_is_known_and_no_other():
    sizes = (PIECE_BYTES,) * 6

    async def main():
        failures = []
        honest = [SlowSource(name=name, sizes=sizes) for name in "ab"]
        liar = SlowSource(name="liar", lies=True, sizes=sizes)
        donors = [donor(source) for source in (*honest, liar)]
        (taken,), _ = await take_all([entry(0, *sizes)], donors, failures)
        assert taken.givers == {"a", "b"}
        assert len(liar.asked) == 2
        assert [name for name, _ in failures] == ["liar"]
        assert "has another digest" in failures[0][1]

    run_virtual(main())


def test_a_body_that_nobody_gives():
    async def main():
        sizes, failures = (PIECE_BYTES,) * 3, []
        donors = [donor(SlowSource(name="x", gives=False)), donor(SlowSource(name="y", lies=True))]
        with pytest.raises(PeerUnreachable, match="no peer has the body of entry 0"):
            await take_all([entry(0, *sizes)], donors, failures)
        assert {name for name, _ in failures} == {"x", "y"} and len(failures) == 2
        with pytest.raises(PeerUnreachable):
            await take_all([entry(0)], [], [])

    run_virtual(main())


def test_nobody_is_asked_for_an_empty_body():
    async def main():
        (taken,), took_s = await take_all([entry(0, 0)], [], [])
        assert taken.data == b"" and not taken.givers and took_s == 0.0

    run_virtual(main())


def test_who_was_not_beyond_an_entry_is_not_asked_for_it():
    async def main():
        near, far = SlowSource(name="near"), SlowSource(name="far")
        entries = [entry(p) for p in range(4)]
        await take_all(entries, [donor(near, position=2), donor(far)], [])
        assert set(near.asked) <= {0, 1}
        assert {2, 3} <= set(far.asked)

    run_virtual(main())


def test_the_newest_may_come_first_and_only_of_those_who_keep_them():
    async def main():
        whole, short = SlowSource(name="whole"), SlowSource(name="short")
        entries = [entry(p) for p in reversed(range(12))]
        donors = [donor(whole), donor(short, first_body=5)]
        async with bodies_of(entries, donors, []) as some:
            assert [some.after(each) for each in (entries[0], entries[-1])] == [11, 0]
        taken, took_s = await take_all(entries, donors, [])
        assert {name for each in taken[:7] for name in each.givers} == {"whole", "short"}
        assert set(short.asked) <= set(range(5, 12))
        assert took_s == pytest.approx(FETCH_S * len(entries) / BODIES_AHEAD)

    run_virtual(main())


def test_large_bodies_are_fetched_one_at_a_time(monkeypatch):
    monkeypatch.setattr(bodies, "BODIES_AHEAD_BYTES", 250)

    async def main(num_bytes):
        source = SlowSource(name="x", sizes=(num_bytes,))
        await take_all([entry(p, num_bytes) for p in range(6)], [donor(source)], [])
        return source.most

    assert run_virtual(main(100)) == 2
    assert run_virtual(main(300)) == 1


def test_the_next_body_comes_while_one_is_applied(monkeypatch):
    monkeypatch.setattr(bodies, "BODIES_AHEAD_BYTES", 1)

    async def main():
        source, loop = SlowSource(name="x"), asyncio.get_running_loop()
        entries = [entry(p) for p in range(5)]
        async with bodies_of(entries, [donor(source)], []) as some:
            for each in entries:
                await some.of(each)
                await asyncio.sleep(2 * FETCH_S)  # it is applied
        assert source.most == 1
        return loop.time()

    assert run_virtual(main()) == FETCH_S + 5 * 2 * FETCH_S


def test_what_is_under_way_is_given_up_with_the_rest():
    async def main():
        source = SlowSource(name="x")
        entries = [entry(p) for p in range(20)]
        with pytest.raises(RuntimeError, match="enough"):
            async with bodies_of(entries, [donor(source)], []) as some:
                await some.of(entries[0])
                raise RuntimeError("enough")
        assert source.under_way == []
        assert len(source.asked) <= 2 * BODIES_AHEAD

    run_virtual(main())
