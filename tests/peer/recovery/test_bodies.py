"""Bodies of missed entries come ahead of their turn, from several donors, and never too many."""

import asyncio
from dataclasses import dataclass, field

import pytest

from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Elector, Entry, Member, Part
from atoll.peer.recovery import bodies
from atoll.peer.recovery.bodies import BODIES_AHEAD, Bodies
from atoll.peer.recovery.sources import Donor
from atoll.peer.rounds.messages import Head

FETCH_S = 1.0


def entry(position, num_bytes=100):
    member = Member(
        peer_id="a", incarnation="0", weight=1.0, clip=1.0, norm=1.0, tokens=1, steps=1, loss=None
    )
    part = Part(
        start_cell=0, stop_cell=1, owner=0, generation=0, wire_bytes=num_bytes, digest=bytes(32)
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
        parts=(part,),
        electorate=(Elector(peer_id="a", incarnation="0"),),
    )


@dataclass(kw_only=True, eq=False)
class SlowSource:
    """Gives any body after a second, if it gives any."""

    name: str
    gives: bool = True
    under_way: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    most: int = 0

    async def body(self, position, body_bytes):
        self.asked.append(position)
        self.under_way.append(position)
        self.most = max(self.most, len(self.under_way))
        try:
            await asyncio.sleep(FETCH_S)
        finally:
            self.under_way.remove(position)
        if not self.gives:
            raise PeerUnreachable("gone", peer=self.name)
        return f"{self.name} {position}".encode()


def donor(source, position=100):
    head = Head(
        protocol=1,
        epoch=0,
        position=position,
        chain=bytes(32),
        incarnation="0",
        role="trainer",
        ready_in_s=0.0,
        first_body=0,
        snapshots=(),
        epoch_record=b"",
    )
    return Donor(source=source, head=head)


async def take_all(entries, donors, failures):
    """The first body of each entry, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s, taken = loop.time(), []
    async with Bodies(entries, donors, lambda e, d, why: failures.append(d.name)) as some:
        for each in entries:
            async for giver, body in some.of(each):
                taken.append((giver.name, body))
                break
    return taken, loop.time() - began_s


def test_several_are_fetched_at_once_and_given_in_order():
    async def main():
        sources = [SlowSource(name="x"), SlowSource(name="y")]
        entries = [entry(p) for p in range(7, 19)]
        taken, took_s = await take_all(entries, [donor(s) for s in sources], [])
        assert [body.split()[1] for _, body in taken] == [str(e.position).encode() for e in entries]
        assert {name for name, _ in taken} == {"x", "y"}
        assert max(s.most for s in sources) == BODIES_AHEAD / 2
        assert took_s == pytest.approx(FETCH_S * len(entries) / BODIES_AHEAD)
        assert sorted(p for s in sources for p in s.asked) == [e.position for e in entries]

    run_virtual(main())


def test_a_donor_that_fails_is_told_and_another_one_gives():
    async def main():
        failures = []
        donors = [donor(SlowSource(name="x", gives=False)), donor(SlowSource(name="y"))]
        taken, _ = await take_all([entry(p) for p in range(4)], donors, failures)
        assert {name for name, _ in taken} == {"y"}
        assert failures == ["x", "x"]

    run_virtual(main())


def test_a_body_that_nobody_gives_gives_nothing():
    async def main():
        taken, _ = await take_all([entry(0)], [donor(SlowSource(name="x", gives=False))], [])
        assert taken == []

    run_virtual(main())


def test_who_was_not_beyond_an_entry_is_not_asked_for_it():
    async def main():
        near, far = SlowSource(name="near"), SlowSource(name="far")
        entries = [entry(p) for p in range(4)]
        await take_all(entries, [donor(near, position=2), donor(far)], [])
        assert set(near.asked) <= {0, 1}
        assert {2, 3} <= set(far.asked)

    run_virtual(main())


def test_large_bodies_are_fetched_one_at_a_time(monkeypatch):
    monkeypatch.setattr(bodies, "BODIES_AHEAD_BYTES", 250)

    async def main(num_bytes):
        source = SlowSource(name="x")
        await take_all([entry(p, num_bytes) for p in range(6)], [donor(source)], [])
        return source.most

    assert run_virtual(main(100)) == 2
    assert run_virtual(main(300)) == 1


def test_what_is_under_way_is_given_up_with_the_rest():
    async def main():
        source = SlowSource(name="x")
        entries = [entry(p) for p in range(20)]
        with pytest.raises(RuntimeError, match="enough"):
            async with Bodies(entries, [donor(source)], lambda *_: None) as some:
                async for _ in some.of(entries[0]):
                    raise RuntimeError("enough")
        assert source.under_way == []
        assert len(source.asked) <= BODIES_AHEAD

    run_virtual(main())
