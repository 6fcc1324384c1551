"""A server of texts over a network in memory: repeats, positions, hostile clients, time."""

import asyncio
import secrets

import numpy as np
import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.scoped import transport_of
from atoll.dht.transport import PeerUnreachable, Refused
from atoll.peer.inference.messages import TEXT, TEXT_PROTOCOL, Extend, Extended, pack, unpack
from atoll.peer.inference.server import BURST_S, TimeShare
from atoll.peer.inference.sessions import SessionRules

FIRST = "stage-1"


class Asker:
    """A client of one server that sends what it likes."""

    def __init__(self, live, server, name="asker"):
        self.server = server
        self.transport = transport_of(server.module, live.network.transport(name))
        self.session = secrets.token_bytes(16)

    async def send(self, body, timeout_s=60.0):
        return await self.transport.call(self.server.name, TEXT, body, timeout_s=timeout_s)

    async def ask(self, tokens, *, start=0, payload=None, timeout_s=60.0, **changes):
        fields = {
            "protocol": TEXT_PROTOCOL,
            "session": self.session,
            "position": None,
            "start": start,
            "rows": len(tokens),
            "max_rows": 16,
        }
        payload = np.asarray(tokens, "<i4").tobytes() if payload is None else payload
        reply = await self.send(pack(Extend(**fields | changes), payload), timeout_s)
        record, rows = unpack(Extended, reply)
        return record, bytes(rows)


def test_an_answer_that_was_lost_is_given_again(live):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))

        def lose(src, dst, method, n):
            if src == asker.server.name:
                live.network.on_message = None
                live.network.reset("asker", asker.server.name)
                return False
            return None

        live.network.on_message = lose
        with pytest.raises(PeerUnreachable):
            await asker.ask([1, 2, 3])
        record, rows = await asker.ask([1, 2, 3])
        assert (record.verdict, record.held) == ("done", 3) and len(rows) == 3 * 64
        assert asker.server.server.statistics().rows == 3  # computed once

    live(use, each=1)


def test_two_at_once_wait_for_one_computation(live):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))
        first, second = await asyncio.gather(asker.ask([1, 2]), asker.ask([1, 2]))
        assert first == second and asker.server.server.statistics().rows == 2

    live(use, each=1)


def test_sessions_keep_the_parameters_they_began_with(live, stages):
    async def use(live):
        server = live.server("stage-1-a")
        asker, same, later = (Asker(live, server, name) for name in ("a", "b", "c"))
        await same.ask([1, 2, 3])
        await asker.ask([1, 2])
        server.position = 5
        record, rows = await asker.ask([3], start=2)
        assert record.position == 4
        assert (await later.ask([1, 2, 3]))[1][-64:] != rows
        assert server.server._params.keys() == {4, 5}
        server.position = 6
        await asyncio.sleep(2.0)
        assert server.server._params.keys() == {5}  # one besides its own, and only while it is read
        record, _ = await asker.ask([1, 2, 3], position=4)
        assert (record.verdict, record.position) == ("moved", 6)
        await asyncio.sleep(121.0)
        assert server.server._params == {}

    live(use, each=1)


@pytest.mark.parametrize(
    ("payload", "changes", "code"),
    [
        (b"", {}, RefusalCode.BAD_MESSAGE),
        (bytes(7), {}, RefusalCode.BAD_MESSAGE),
        (bytes(1 << 20), {}, RefusalCode.BAD_MESSAGE),
    ],
)
def test_a_payload_of_another_length_is_refused(live, payload, changes, code):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))
        with pytest.raises(Refused) as refused:
            await asker.ask([1, 2], payload=payload, **changes)
        assert refused.value.code is code
        assert asker.server.server.statistics().sessions == 0

    live(use, each=1)


def test_bytes_that_are_no_question_are_refused(live):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))
        for body in (b"", b"\xff" * 400, bytes(100)):
            with pytest.raises(Refused) as refused:
                await asker.send(body)
            assert refused.value.code is RefusalCode.BAD_MESSAGE

    live(use, each=1)


@pytest.mark.parametrize(
    ("tokens", "changes", "reason"),
    [
        ([1], {"protocol": 99}, "protocol"),
        ([1], {"max_rows": 17}, "shape"),
        ([1], {"start": 16}, "shape"),
        ([1] * 17, {"max_rows": 17}, "shape"),
        ([256], {}, "payload"),
        ([-1], {}, "payload"),
    ],
)
def test_a_question_that_does_not_fit_the_run_is_refused(live, tokens, changes, reason):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))
        record, rows = await asker.ask(tokens, **changes)
        assert (record.verdict, record.reason, rows) == ("refused", reason, b"")
        assert asker.server.server.statistics().sessions == 0

    live(use, each=1)


def test_numbers_that_are_not_finite_end_the_session(live):
    async def use(live):
        asker = Asker(live, live.server("stage-2-a"))
        row = np.full(16, np.nan, "<f4").tobytes()
        record, _ = await asker.ask([0], payload=row)
        assert (record.verdict, record.reason) == ("refused", "payload")
        assert asker.server.server.statistics().sessions == 0

    live(use, each=1)


def test_a_hostile_client_takes_no_session_of_others(live, stages):
    """It begins sessions without end; the text of another client goes on, and memory is bounded."""

    def use_of(rules):
        async def use(live):
            server = live.server("stage-1-a")
            honest, hostile = Asker(live, server, "honest"), Asker(live, server, "hostile")
            await honest.ask([1, 2])
            for _ in range(50):
                hostile.session = secrets.token_bytes(16)
                await hostile.ask([5])
                assert server.server.statistics().num_bytes <= rules.max_bytes
            record, _ = await honest.ask([3], start=2)
            assert (record.verdict, record.held) == ("done", 3)
            assert server.server.statistics().sessions == 1 + rules.client_sessions

        return use

    stage = stages.served(FIRST)
    rules = SessionRules(shape=stage.shape, cache_bytes=stage.cache_bytes)
    live(use_of(rules), each=1)


def test_a_computation_goes_on_without_its_client(live):
    async def use(live):
        asker = Asker(live, live.server("stage-1-a"))
        asker.server.server._time.spend(BURST_S + 10.0, asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await asker.ask([1, 2], timeout_s=1.0)
        await asyncio.sleep(20.0)
        assert asker.server.server.statistics().rows == 2
        record, _ = await asker.ask([3], start=2)
        assert record.held == 3

    live(use, each=1)


def test_time_is_spent_in_bursts_up_to_the_share():
    time, now_s, computed_s = TimeShare(share=0.2), 0.0, 0.0
    assert time.wait_s(0.0) == 0.0
    while now_s < 100.0:
        now_s += time.wait_s(now_s)
        assert time.wait_s(now_s) == pytest.approx(0.0, abs=1e-9)
        now_s += 0.5
        computed_s += 0.5
        time.spend(0.5, now_s)
    assert 0.2 * now_s <= computed_s <= 0.2 * now_s + BURST_S + 0.5


def test_all_of_the_time_is_no_rest():
    time, now_s = TimeShare(share=1.0), 0.0
    for _ in range(100):
        assert time.wait_s(now_s) == 0.0
        now_s += 3.0
        time.spend(3.0, now_s)


def test_a_long_pause_earns_one_burst():
    time = TimeShare(share=0.5)
    time.spend(0.0, 0.0)
    assert time.wait_s(1e6) == 0.0
    time.spend(BURST_S + 1.0, 1e6)
    assert time.wait_s(1e6) == pytest.approx(2.0)
