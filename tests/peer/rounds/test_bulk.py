"""Bulk within a cap of the link: what passes, and what is asked for."""

import asyncio

import pytest

from atoll.dht.testing.virtualtime import run_virtual as run
from atoll.peer.rounds.bulk import BITS, LEAST_SHARE, MAX_STREAMS, SPAN_S, Inflow, Throttle

PIECE = 125_000  # 1 Mbit
LEAF = 1 << 20
RATE_MBIT_S = 4.7


def test_bulk_passes_at_the_rate_of_its_allowance():
    async def main():
        throttle, loop = Throttle(), asyncio.get_running_loop()
        took_s = []

        async def pass_all():
            for _ in range(10):
                await throttle.take(PIECE)

        for rate_mbit_s in (float("inf"), 10.0):
            throttle.rate_mbit_s, began_s = rate_mbit_s, loop.time()
            await asyncio.gather(pass_all(), pass_all())  # two streams share it
            took_s.append(loop.time() - began_s)
        return took_s

    assert run(main()) == pytest.approx([0.0, 2.0])


class Wire:
    """A link that counts what comes, and when."""

    def __init__(self, unasked_mbit_s=0.0):
        self.arrivals = []
        self.unasked_mbit_s = unasked_mbit_s
        self.inflow = Inflow()
        self.inflow.limit(RATE_MBIT_S, lambda: round(sum(num for _, num in self.arrivals)))

    def arrive(self, num_bytes):
        self.arrivals.append((asyncio.get_running_loop().time(), num_bytes))

    async def others(self):
        while True:
            await asyncio.sleep(0.1)
            self.arrive(0.1 * self.unasked_mbit_s / BITS)

    async def fetch(self, num_bytes, takes_s):
        """Ask for some bytes, which come in that time as one message."""
        async with self.inflow.asking(num_bytes) as came:
            for _ in range(8):
                await asyncio.sleep(takes_s / 8)
                self.arrive(num_bytes / 8)
            came(num_bytes)

    def most_mbit_s(self):
        """The highest rate within `SPAN_S`."""
        return max(
            sum(num for at, num in self.arrivals if end - SPAN_S < at <= end) * BITS / SPAN_S
            for end, _ in self.arrivals
        )

    def mean_mbit_s(self):
        return sum(num for _, num in self.arrivals) * BITS / self.arrivals[-1][0]


def fetched(wire, *donors):
    """Fetch from donors at once, (bytes, seconds that they take, how many) of each."""

    async def drain(num_bytes, takes_s, count):
        for _ in range(count):
            await wire.fetch(num_bytes, takes_s)

    async def main():
        others = asyncio.create_task(wire.others())
        await asyncio.gather(*(drain(*donor) for donor in donors))
        others.cancel()

    run(main())
    return wire


def test_what_comes_unasked_is_within_the_rate_too():
    wire = fetched(Wire(unasked_mbit_s=2.0), (LEAF, 0.1, 30), (LEAF, 0.1, 30))
    assert wire.most_mbit_s() < 1.02 * RATE_MBIT_S
    assert wire.mean_mbit_s() > 0.75 * RATE_MBIT_S


def test_what_a_slow_donor_owes_is_not_asked_of_others_too():
    body = 3_300_000
    slow = [(body, 17.0, 3)] * 3
    wire = fetched(Wire(), *slow, *[(body, 0.3, 4)] * 3)
    assert wire.most_mbit_s() < 1.02 * RATE_MBIT_S


def test_a_link_full_of_rounds_leaves_a_third_to_recoveries():
    wire = Wire(unasked_mbit_s=2 * RATE_MBIT_S)
    loop_s = []

    async def main():
        others, loop = asyncio.create_task(wire.others()), asyncio.get_running_loop()
        await asyncio.sleep(2 * SPAN_S)
        wire.inflow.look()
        began_s = loop.time()
        for _ in range(4):
            await wire.fetch(LEAF, 0.0)
        loop_s.append((loop.time() - began_s) / 4)
        others.cancel()

    run(main())
    leaf_s = LEAF * BITS / RATE_MBIT_S
    assert leaf_s / LEAST_SHARE < loop_s[0] < 1.1 * (leaf_s + leaf_s / LEAST_SHARE)


def test_more_than_a_span_is_asked_for_all_the_same():
    wire = Wire()
    longer = int(2 * SPAN_S * RATE_MBIT_S / BITS)
    fetched(wire, (longer, 1.0, 2))
    assert sum(num for _, num in wire.arrivals) == pytest.approx(2 * longer)


def test_what_never_came_is_owed_no_more():
    async def main():
        inflow, loop = Inflow(), asyncio.get_running_loop()
        inflow.limit(RATE_MBIT_S)
        for _ in range(8):  # the donor fails each time
            async with inflow.asking(LEAF) as came:
                came(LEAF // 2)
        return loop.time()

    assert run(main()) == pytest.approx(8 * LEAF * BITS / RATE_MBIT_S)


def test_a_donor_that_refuses_costs_none_of_the_rate():
    async def main():
        inflow, loop = Inflow(), asyncio.get_running_loop()
        inflow.limit(RATE_MBIT_S)
        for _ in range(8):
            async with inflow.asking(LEAF):
                await asyncio.sleep(0.01)
        async with inflow.asking(LEAF) as came:
            came(LEAF)
        return loop.time()

    assert run(main()) < 2 * LEAF * BITS / RATE_MBIT_S + 8 * 0.01


@pytest.mark.parametrize(("rate_mbit_s", "most"), [(RATE_MBIT_S, MAX_STREAMS), (None, 6)])
def test_few_streams_take_what_a_cap_gives(rate_mbit_s, most):
    async def main():
        inflow, open_, found = Inflow(), [], []
        if rate_mbit_s:
            inflow.limit(rate_mbit_s)

        async def read(number):
            async with inflow.stream():
                open_.append(number)
                found.append(len(open_))
                await asyncio.sleep(1.0)
                open_.remove(number)

        await asyncio.gather(*map(read, range(6)))
        return max(found)

    assert run(main()) == most


def test_a_link_without_a_cap_asks_at_once():
    async def main():
        inflow, loop = Inflow(), asyncio.get_running_loop()
        assert not inflow.is_limited
        inflow.look()
        async with inflow.asking(1 << 40) as came:
            came(1 << 40)
        return loop.time()

    assert run(main()) == 0.0
