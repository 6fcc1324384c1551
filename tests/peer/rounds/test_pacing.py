"""Turns at the uplink, and what a round's readings say of a link."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.dht.tasks import end
from atoll.dht.testing.virtualtime import run_virtual as run
from atoll.peer.rounds.pacing import (
    BURST_S,
    MIN_FLOW_IN_FLIGHT_BYTES,
    MIN_IN_FLIGHT_BYTES,
    QUEUE_S,
    ROUND_TRIP_S,
    SAMPLE_S,
    UNKNOWN_MBIT_S,
    Limits,
    Link,
    Pacer,
)
from atoll.peer.rounds.rates import (
    FLOW_S,
    GAIN,
    LEAST_READINGS,
    SEARCH_GAIN,
)
from atoll.peer.rounds.slots import MAX_SLOTS
from support.pacing import samples

PIECE = 125_000  # 1 Mbit
MESSAGE = 65_536  # bytes of cells that leave at once


def paced(rate_mbit_s):
    pacer = Pacer()
    pacer.rate_mbit_s = rate_mbit_s
    return pacer


def test_turns_are_granted_at_the_pace():
    async def main():
        pacer, loop = paced(10.0), asyncio.get_running_loop()
        began_s = loop.time()
        for number in range(21):
            await pacer.turn(PIECE, (0, 0, number))
            pacer.confirm(PIECE, 0.1)
        return loop.time() - began_s

    assert run(main()) == pytest.approx(2.0, abs=BURST_S)


def test_a_link_of_unknown_speed_is_not_paced():
    async def main():
        pacer = Pacer()
        assert all(pacer.turn(PIECE, (n,)).done() for n in range(2))

    run(main())


def test_no_more_is_under_way_than_was_confirmed_lately():
    async def main():
        pacer = Pacer()
        turns = [pacer.turn(PIECE, (n,)) for n in range(100)]
        granted = [sum(turn.done() for turn in turns)]
        pacer.confirm(4 * PIECE, 0.1)
        granted.append(sum(turn.done() for turn in turns))
        return granted

    first, second = run(main())
    assert first == -(-MIN_IN_FLIGHT_BYTES // PIECE)
    limit_s = QUEUE_S + ROUND_TRIP_S
    assert second == pytest.approx(first + 4 + (limit_s * 40 - first), abs=2)


def test_what_is_never_confirmed_blocks_nobody_for_ever():
    async def main():
        pacer = Pacer()
        turns = [pacer.turn(PIECE, (n,)) for n in range(12)]
        for _ in range(1000):
            pacer.confirm(0, 0.1)
        return all(turn.done() for turn in turns)

    assert run(main())


def test_lost_bytes_give_their_room_back_while_others_are_confirmed():
    """Confirmations from live peers show that the link works, so no silence ends the wait."""

    async def main():
        pacer, room = Pacer(), []
        pacer.turn(3 * MIN_IN_FLIGHT_BYTES // 4, (0,))  # to a machine that died
        for _ in range(200):
            turns = [pacer.turn(PIECE // 8, (n,)) for n in range(40)]
            room.append(sum(turn.done() for turn in turns))
            for turn in turns:
                turn.cancel()
            pacer.confirm(room[-1] * (PIECE // 8), 1.0)
        return room[0], room[-1]

    at_first, later = run(main())
    assert at_first < 0.3 * MIN_IN_FLIGHT_BYTES / (PIECE // 8)
    assert later > 0.95 * MIN_IN_FLIGHT_BYTES / (PIECE // 8)


def test_a_round_does_not_pay_for_the_one_before():
    async def main():
        pacer = Pacer()
        assert not all(pacer.turn(PIECE, (n,)).done() for n in range(20))
        pacer.restart()
        pacer.confirm(0, 0.1)
        return pacer.turn(PIECE, (0,)).done()

    assert run(main())


def test_codes_go_before_results_and_receivers_take_turns():
    async def main():
        pacer, granted = paced(10.0), []

        async def flow(name, leg, receiver):
            for number in range(3):
                await pacer.turn(PIECE, (7, leg, number, receiver))
                pacer.confirm(PIECE, 0.1)
                granted.append((name, number))

        await pacer.turn(PIECE, (0,))
        flows = [("r2", 1, 2), ("c2", 0, 2), ("r1", 1, 1), ("c1", 0, 1)]
        await asyncio.gather(*(flow(*f) for f in flows))
        return granted

    granted = run(main())
    codes = [g for g in granted if g[0].startswith("c")]
    assert codes == [("c1", 0), ("c2", 0), ("c1", 1), ("c2", 1), ("c1", 2), ("c2", 2)]
    assert granted[:6] == codes


def test_the_older_position_goes_first():
    async def main():
        pacer, order = paced(10.0), []
        await pacer.turn(PIECE, (0,))
        for position in (9, 8):
            turn = pacer.turn(PIECE, (position, 0, 0, 1))
            turn.add_done_callback(lambda _, p=position: order.append(p))
        await asyncio.sleep(1)
        return order

    assert run(main()) == [8, 9]


def test_a_turn_that_was_given_up_costs_nothing():
    async def main():
        pacer, loop = paced(10.0), asyncio.get_running_loop()
        await pacer.turn(PIECE, (0,))
        for number in range(50):
            pacer.turn(PIECE, (1, number)).cancel()
        began_s = loop.time()
        await pacer.turn(PIECE, (2,))
        return loop.time() - began_s

    assert run(main()) <= 0.1


def test_after_a_pause_no_more_than_a_burst_is_caught_up():
    async def main():
        pacer, loop = paced(10.0), asyncio.get_running_loop()
        await pacer.turn(PIECE, (0,))
        await asyncio.sleep(60)
        began_s = loop.time()
        for number in range(20):
            await pacer.turn(PIECE, (1, number))
            pacer.confirm(PIECE, 0.1)
        return loop.time() - began_s

    assert run(main()) >= 19 * 0.1 - BURST_S


def test_two_short_legs_make_no_round_that_is_long_enough_to_be_read():
    link = Link()
    link.learn([samples(40, 40, 40, 40)])
    link.learn([samples(50, 50), samples(50, 50)])
    assert link.pacer.rate_mbit_s is None


def test_a_reading_of_one_sample_says_nothing():
    link = Link()
    link.learn([samples(40, 40, 40, 40)])
    paced = link.pacer.rate_mbit_s
    link.learn([samples()])
    assert link.pacer.rate_mbit_s == paced


def test_what_the_owner_declares_is_not_measured_away():
    link = Link()
    link.declare(20.0)
    link.learn([samples(100, 100, 100, 100)])
    assert link.uplink_mbit_s == 20.0
    assert link.pacer.rate_mbit_s is not None and link.pacer.rate_mbit_s < 20.0


@pytest.mark.parametrize(
    ("declared", "measured", "pace"),
    [
        (0.0, None, 18.8),  # nothing is known yet: the cap is the pace from the first round on
        (0.0, 200.0, 18.8),
        (0.0, 8.0, 8.0 * SEARCH_GAIN),
        (100.0, None, 18.8),
        (10.0, 200.0, 9.4),
    ],
)
def test_no_pace_exceeds_the_cap_of_the_owner(declared, measured, pace):
    link = Link()
    link.cap(30.0)  # a third of it is for joiners and the coordinator
    link.declare(declared)
    if measured:
        link.learn([samples(*[measured] * 8)])
    assert link.pacer.rate_mbit_s == pytest.approx(pace)
    assert link.uplink_mbit_s < 20.01
    assert link.downlink_mbit_s <= 30.0
    assert link.pacer.rate_mbit_s + link.outflow.rate_mbit_s <= 30.0


def test_a_link_without_a_cap_is_used_as_before():
    link = Link()
    assert link.pacer.rate_mbit_s is None
    link.cap(0.0)
    assert (link.pacer.rate_mbit_s, link.max_readers) == (None, MAX_SLOTS)
    assert link.outflow.rate_mbit_s == link.inflow.rate_mbit_s == float("inf")


def test_few_read_from_a_link_with_a_low_cap():
    link = Link()
    readers = [link.cap(most) or link.max_readers for most in (5.0, 12.0, 100.0)]
    assert readers == [2, 6, MAX_SLOTS]


def test_a_pace_that_holds_up_a_short_round_is_dropped_until_a_long_one():
    link = Link()
    link.learn([samples(40, 40, 40, 40)])
    assert link.pacer.rate_mbit_s == pytest.approx(40.0 * SEARCH_GAIN)
    link.learn([samples(50, 50)])
    assert link.pacer.rate_mbit_s is None
    assert link.uplink_mbit_s == pytest.approx(40.0)
    link.learn([samples(900, 900, 900, 900)])
    assert link.pacer.rate_mbit_s == pytest.approx(900.0 * SEARCH_GAIN)


def test_a_short_round_that_nothing_held_leaves_the_pace():
    link = Link()
    link.learn([samples(40, 40, 40, 40)])
    paced = link.pacer.rate_mbit_s
    for readings in ([], samples(50, 50, busy=False), samples(50, 50, 50, 50, busy=False)):
        link.learn([readings])
        assert link.pacer.rate_mbit_s == paced


def test_a_link_learns_from_a_round():
    link = Link()
    assert (link.uplink_mbit_s, link.pacer.rate_mbit_s) == (UNKNOWN_MBIT_S, None)
    link.learn([samples(40, 40, 40, 40)])
    assert link.uplink_mbit_s == pytest.approx(40.0)
    assert link.downlink_mbit_s == pytest.approx(40.0)


class Counting:
    """A transport of which only the counters are looked at: a link at a steady rate."""

    def __init__(self, mbit_s):
        self.mbit_s = mbit_s

    def statistics(self):
        sent = int(asyncio.get_running_loop().time() * self.mbit_s / 8e-6)
        return SimpleNamespace(wire_bytes_delivered=sent, wire_bytes_received=sent)


async def watched(link, *spans):
    """Reductions that begin and end at these times, always with more to send."""
    transport, began_s = Counting(40.0), asyncio.get_running_loop().time()

    async def reduction(begin_s, end_s, disturbed):
        await asyncio.sleep(begin_s)
        watch = link.watch(transport)
        while asyncio.get_running_loop().time() < began_s + end_s:
            link.pacer.turn(PIECE, (0,))
            await asyncio.sleep(0.01)
        watch.disturbed = disturbed
        watch.close()

    await asyncio.gather(*(reduction(*span) for span in spans))


def test_reductions_side_by_side_read_the_link_once():
    async def main():
        link, learned = Link(), []
        learn, link.learn = link.learn, learned.append
        await watched(link, (0.0, 2.0, False), (1.0, 3.0, False))
        learn(learned[0])
        return link.uplink_mbit_s, [(s[0][0].at_s, s[-1][-1].at_s) for s in learned]

    rate, spans = run(main())
    assert rate == pytest.approx(40.0)
    first, second = spans
    assert first == pytest.approx((0.0, 2.0), abs=0.11)
    assert second == pytest.approx((2.0, 3.0), abs=0.11)


def test_a_reduction_that_stumbled_spoils_what_was_read_beside_it():
    async def main():
        link, learned = Link(), []
        link.learn = learned.append
        await watched(link, (0.0, 2.0, True), (1.0, 3.0, False))
        return [(s[0][0].at_s, s[-1][-1].at_s) for s in learned]

    (after,) = run(main())
    assert after == pytest.approx((2.0, 3.0), abs=0.11)


async def carried_mbit_s(link, capacity_mbit_s, round_trip_s, *, seconds):
    """What a long link carries of a peer that always has more to send; confirmations take long."""
    loop, delivered, free_at_s = asyncio.get_running_loop(), [0], [0.0]

    def arrive():
        delivered[0] += PIECE

    async def send():
        while True:
            await link.pacer.turn(PIECE, (0,))
            free_at_s[0] = max(loop.time(), free_at_s[0]) + PIECE * 8e-6 / capacity_mbit_s
            loop.call_at(free_at_s[0] + round_trip_s, arrive)

    counters = SimpleNamespace(
        statistics=lambda: SimpleNamespace(wire_bytes_delivered=delivered[0], wire_bytes_received=0)
    )
    watch, sending = link.watch(counters), asyncio.create_task(send())
    await asyncio.sleep(seconds)
    watch.close()
    await end(sending)
    return delivered[0] * 8e-6 / seconds


@pytest.mark.parametrize(("declared_mbit_s", "gain"), [(0.0, 1.2), (50.0, 1.05)])
def test_a_round_trip_of_300_ms_slows_nobody_who_knows_it(declared_mbit_s, gain):
    """In a round of three seconds, of which the last confirmations miss a tenth."""

    async def main(known):
        link = Link()
        link.declare(declared_mbit_s)
        if known:
            for seconds in (1.3, 0.3, 0.31):  # the first had to dial
                link.note_round_trip("far", seconds)
            link.note_round_trip("near", 0.01)
        return await carried_mbit_s(link, 50.0, 0.3, seconds=3.0)

    with_it, without = run(main(known=True)), run(main(known=False))
    assert with_it > gain * without
    assert with_it > 0.75 * 50.0


async def rounds_after_a_loss(link, capacity_mbit_s, lost_bytes, *, rounds):
    """Seconds of each round of 4 MB; a machine dies in the first, with bytes on their way to it.

    All the while, keepalives and votes are confirmed: 3 kB a reading.
    """
    loop, began_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    delivered, free_at_s, took_s = [0], [0.0], []
    counters = SimpleNamespace(
        statistics=lambda: SimpleNamespace(
            wire_bytes_delivered=delivered[0] + int(30e3 * (loop.time() - began_s)),
            wire_bytes_received=0,
        )
    )

    def arrive(done):
        delivered[0] += PIECE
        done.set_result(None)

    for number in range(rounds):
        round_began_s, arrived = loop.time(), []
        watch = link.watch(counters)
        if number == 0:
            link.pacer.turn(lost_bytes, (0,))
        for _ in range(32):
            await link.pacer.turn(PIECE, (0,))
            free_at_s[0] = max(loop.time(), free_at_s[0]) + PIECE * 8e-6 / capacity_mbit_s
            arrived.append(loop.create_future())
            loop.call_at(free_at_s[0], arrive, arrived[-1])
        upfront = link.watch(counters)  # of the next round: the link is read without a break
        await asyncio.gather(*arrived)
        watch.close()
        took_s.append(loop.time() - round_began_s)
        upfront.pause()
    return took_s


@pytest.mark.parametrize("lost_bytes", [400_000, 16_000_000])
@pytest.mark.parametrize("capacity_mbit_s", [40.0, 1000.0])
def test_bytes_to_the_dead_cost_one_round_little_and_later_ones_nothing(
    capacity_mbit_s, lost_bytes
):
    async def main():
        link = Link()
        link.note_round_trip("far", 0.05)
        took_s = await rounds_after_a_loss(link, capacity_mbit_s, lost_bytes, rounds=6)
        return took_s, link.uplink_mbit_s

    took_s, uplink_mbit_s = run(main())
    least_s = 32 / capacity_mbit_s  # of pieces of 1 Mbit
    # A loss shows after a round trip and the time of a queue, at the next reading.
    assert took_s[0] < least_s + 0.05 + QUEUE_S + 3 * SAMPLE_S
    assert max(took_s[1:]) < 1.3 * least_s + 3 * SAMPLE_S
    assert uplink_mbit_s > 0.9 * min(capacity_mbit_s, UNKNOWN_MBIT_S)


@pytest.mark.parametrize("learns", [True, False])
def test_what_an_owner_still_has_to_send_does_not_wait_for_the_next_round(learns):
    async def main():
        link = Link()
        watch = link.watch(Counting(0.0))
        turns = [link.pacer.turn(MIN_IN_FLIGHT_BYTES, (0,)) for _ in range(3)]
        waited = [not turn.done() for turn in turns]
        link.unwatch(watch, learns=learns)
        turns.append(link.pacer.turn(MIN_IN_FLIGHT_BYTES, (0,)))
        return waited, [turn.done() for turn in turns]

    assert run(main()) == ([False, True, True], [True] * 4)


def test_silence_on_a_link_whose_round_trip_nobody_knows_is_no_loss():
    """An answer takes up to a second there."""

    async def main():
        pacer = Pacer()
        pacer.turn(4 * MIN_IN_FLIGHT_BYTES, (0,))
        return [pacer.confirm(0, SAMPLE_S) for _ in range(14)]

    lost = run(main())
    assert lost.index(True) == 12


def test_codes_up_front_and_what_comes_after_are_read_as_one_round():
    async def main():
        link, learned = Link(), []
        learn, link.learn = link.learn, learned.append
        codes = link.watch(Counting(40.0))
        for _ in range(100):
            link.pacer.turn(PIECE, (0,))
            await asyncio.sleep(0.01)
        codes.pause()
        await asyncio.sleep(30.0)
        await watched(link, (0.0, 1.0, False))
        codes.close()
        learn(*learned)
        return link.uplink_mbit_s, [s[-1].at_s - s[0].at_s for s in learned[0]]

    rate, spans = run(main())
    assert rate == pytest.approx(40.0)
    assert spans == pytest.approx([1.0, 1.0], abs=0.11)


def test_who_sends_what_others_let_it_send_does_not_fill_its_link():
    """Two messages each tenth of a second, confirmed at once: 10 Mbit/s say nothing of the link."""

    async def main():
        link, fast = Link(), Counting(1e6)
        watch = link.watch(fast)
        for _ in range(20):
            for number in range(2):
                await link.pacer.turn(MESSAGE, (number,))
            await asyncio.sleep(SAMPLE_S)
        watch.close()
        return link.pacer.rate_mbit_s, link.uplink_mbit_s

    assert run(main()) == (None, UNKNOWN_MBIT_S)


async def paces_of_rounds(link, capacity_mbit_s, messages, pause_s, *, rounds):
    """The pace of each round over a simulated uplink: half of it up front, half after a pause."""
    loop, delivered, free_at_s, paces = asyncio.get_running_loop(), [0], [0.0], []
    counters = SimpleNamespace(
        statistics=lambda: SimpleNamespace(wire_bytes_delivered=delivered[0], wire_bytes_received=0)
    )

    def arrive(num_bytes):
        delivered[0] += num_bytes

    async def send(number):
        await link.pacer.turn(MESSAGE, (number,))
        for _ in range(8):  # packets
            free_at_s[0] = max(loop.time(), free_at_s[0]) + MESSAGE / 8 * 8e-6 / capacity_mbit_s
            loop.call_at(free_at_s[0] + 0.02, arrive, MESSAGE // 8)

    for _ in range(rounds):
        paces.append(link.pacer.rate_mbit_s)
        codes = link.watch(counters)
        await asyncio.gather(*map(send, range(messages // 2)))
        codes.pause()
        await asyncio.sleep(pause_s)
        watch = link.watch(counters)
        await asyncio.gather(*map(send, range(messages // 2)))
        await asyncio.sleep(max(0.0, free_at_s[0] - loop.time()) + 0.02)
        watch.close()
        codes.close()
        await asyncio.sleep(1.0)
    return paces


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_rounds_of_three_megabytes_pace_a_slow_link(pause_s):
    """In two halves, each too short to be read for 1 MiB: queues overflowed."""
    first, search, *later = run(paces_of_rounds(Link(), 10.0, 48, pause_s, rounds=16))
    assert first is None
    assert search == pytest.approx(10.0 * SEARCH_GAIN, rel=0.05)
    assert later == pytest.approx([10.0 * GAIN] * len(later), rel=0.05)


def test_what_is_still_under_way_counts_after_a_pause():
    """The codes that left up front are in the queue: no other 256 KiB go there at once."""

    async def main():
        link, still = Link(), Counting(0.0)
        codes = link.watch(still)
        turns = [link.pacer.turn(PIECE, (n,)) for n in range(fitting)]
        codes.pause()
        link.watch(still)
        await asyncio.sleep(0.0)
        turns += [link.pacer.turn(PIECE, (n,)) for n in range(8)]
        return sum(turn.done() for turn in turns)

    fitting = -(-MIN_IN_FLIGHT_BYTES // PIECE)
    assert run(main()) == fitting


def test_the_shortest_round_trip_of_the_furthest_peer_counts():
    """A busy machine makes some answers late, and no link longer."""
    link = Link()
    for seconds in (0.9, 0.1, 0.5):
        link.note_round_trip("far", seconds)
    assert link.pacer.round_trip_s == 0.1
    link.note_round_trip("near", 0.02)
    assert link.pacer.round_trip_s == 0.1
    link.note_round_trip("stalled", 20.0)
    assert link.pacer.round_trip_s == 1.0


def test_less_is_on_the_way_of_what_flows():
    async def main():
        link = Link()
        attending = asyncio.create_task(link.attend(Counting(0.0)))
        await asyncio.sleep(2.5 * SAMPLE_S)
        turns = [link.pacer.turn(PIECE // 8, (n,)) for n in range(80)]
        flowing = sum(turn.done() for turn in turns)
        attending.cancel()
        await asyncio.sleep(0)
        return flowing, link.pacer.limits

    flowing, after = run(main())
    assert flowing == -(-MIN_FLOW_IN_FLIGHT_BYTES // (PIECE // 8))
    assert after == Limits()


class Flowing:
    """An uplink with a queue, and a peer that always has more to send, for as long as it flows."""

    def __init__(self, link, mbit_s):
        self.link, self.mbit_s = link, mbit_s
        self.delivered = 0
        self.queues_s = []
        self._free_at_s = 0.0

    def statistics(self):
        return SimpleNamespace(wire_bytes_delivered=self.delivered, wire_bytes_received=0)

    def _arrive(self, num_bytes):
        self.delivered += num_bytes

    async def _send(self):
        packets = 16
        loop = asyncio.get_running_loop()
        while True:
            await self.link.pacer.turn(MESSAGE, (0,))
            self._free_at_s = max(loop.time(), self._free_at_s) + MESSAGE * 8e-6 / self.mbit_s
            self.queues_s.append(self._free_at_s - loop.time())
            for n in range(packets):
                before_s = n * MESSAGE / packets * 8e-6 / self.mbit_s
                loop.call_at(self._free_at_s - before_s + 0.05, self._arrive, MESSAGE // packets)

    async def flow(self, *spans_s):
        """Return of each span the Mbit/s that arrive, and the mean queue in seconds."""
        attending = asyncio.create_task(self.link.attend(self))
        await asyncio.sleep(0)
        sending, found = asyncio.create_task(self._send()), []
        for seconds in spans_s:
            before, self.queues_s = self.delivered, []
            await asyncio.sleep(seconds)
            rate = (self.delivered - before) * 8e-6 / seconds
            found.append((rate, sum(self.queues_s) / len(self.queues_s)))
        await end(sending)
        await end(attending)
        return found


@pytest.mark.parametrize("mbit_s", [5.0, 10.0, 100.0])
def test_what_flows_without_an_end_fills_a_link_and_not_its_queue(mbit_s):
    unpaced, _, paced = run(Flowing(Link(), mbit_s).flow(LEAST_READINGS * FLOW_S, 60.0, 60.0))
    assert paced[0] > 0.9 * mbit_s
    assert paced[1] < 0.6 * unpaced[1]


def test_nothing_is_paced_by_what_flows_once_it_ends():
    async def main():
        flowing = Flowing(Link(), 10.0)
        await flowing.flow(30.0)
        return flowing.link.pacer.rate_mbit_s

    assert run(main()) is None


def test_a_declared_rate_holds_for_what_flows():
    async def main():
        flowing = Flowing(Link(), 100.0)
        flowing.link.declare(10.0)
        return await flowing.flow(30.0)

    ((rate, _),) = run(main())
    assert 9.0 < rate < 10.0
