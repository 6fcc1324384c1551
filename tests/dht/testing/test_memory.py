import asyncio
import random

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import MemoryLink, MemoryNetwork, VirtualTimeLoop, run_virtual
from atoll.dht.testing.virtualtime import Deadlock
from atoll.dht.transport import (
    MAX_MESSAGE_BYTES,
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
    TransportError,
)


async def echo(remote, body):
    return remote.encode() + b":" + body


async def echo_stream(remote, stream):
    while (data := await stream.recv(timeout_s=60)) is not None:
        await stream.send(data, timeout_s=60)


def pair(**options):
    network = MemoryNetwork(**options)
    a, b = network.transport("a"), network.transport("b")
    b.serve("echo", echo)
    b.serve_stream("echo", echo_stream)
    return network, a, b


def now_s():
    return asyncio.get_running_loop().time()


def test_an_hour_of_waiting_takes_no_time():
    async def main():
        start_s = now_s()
        await asyncio.sleep(3600)
        return now_s() - start_s

    assert run_virtual(main()) == pytest.approx(3600)


def test_the_clock_stands_still_while_a_thread_works():
    async def main():
        async with asyncio.timeout(0.001):
            return await asyncio.to_thread(lambda: sum(range(10**6)))

    assert run_virtual(main()) > 0


def test_a_wait_that_nothing_can_end_is_named(monkeypatch):
    monkeypatch.setattr("atoll.dht.testing.virtualtime.OUTSIDE_S", 0.01)

    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        loop = VirtualTimeLoop()
        task = loop.create_task(main())
        try:
            loop.run_until_complete(task)
        finally:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            loop.close()


def test_call_answers_with_the_remote_peer_id():
    async def main():
        _, a, _ = pair()
        return await a.call("b", "echo", b"hi", timeout_s=1)

    assert run_virtual(main()) == b"a:hi"


def test_refusals_carry_their_code():
    def closed(remote, credential, use=""):
        if credential != b"ticket":
            raise Refused(RefusalCode.NOT_ADMITTED, "expected a ticket")

    async def main():
        network = MemoryNetwork()
        a = network.transport("a")
        b = network.transport("b", check=closed)
        b.serve("echo", echo)
        b.serve_stream("echo", echo_stream)
        with pytest.raises(Refused, match="ticket") as caught:
            await a.call("b", "echo", b"", timeout_s=1)
        assert caught.value.code == RefusalCode.NOT_ADMITTED
        stream = await a.open("b", "echo", timeout_s=1)
        with pytest.raises(Refused, match="ticket"):
            await stream.recv(timeout_s=1)
        a.admission = b"ticket"
        assert await a.call("b", "echo", b"", timeout_s=1) == b"a:"
        with pytest.raises(Refused, match=RefusalCode.UNKNOWN_METHOD):
            await a.call("b", "nothing", b"", timeout_s=1)
        assert b.statistics().refused == 3
        assert not network.errors

    run_virtual(main())


def test_a_handler_that_breaks_is_an_internal_refusal_and_is_noted():
    async def main():
        network, a, b = pair()

        async def broken(remote, body):
            raise ZeroDivisionError

        b.serve("broken", broken)
        with pytest.raises(Refused, match=RefusalCode.INTERNAL):
            await a.call("b", "broken", b"", timeout_s=1)
        assert isinstance(network.errors[0], ZeroDivisionError)

    run_virtual(main())


def test_stream_keeps_order_and_boundaries_under_jitter():
    async def main():
        _, a, _ = pair(latency_s=0.05, jitter_s=0.2)
        sent = [bytes([i]) * (i + 1) for i in range(50)]
        async with await a.open("b", "echo", timeout_s=1) as stream:
            for data in sent:
                await stream.send(data, timeout_s=1)
            await stream.end(timeout_s=1)
            got = []
            while (data := await stream.recv(timeout_s=5)) is not None:
                got.append(data)
        assert got == sent

    run_virtual(main())


def test_streams_overtake_each_other_under_jitter():
    async def main():
        network = MemoryNetwork(random.Random(3), latency_s=0.01, jitter_s=0.5)
        a, b = network.transport("a"), network.transport("b")
        order = []

        async def note(remote, stream):
            order.append(await stream.recv(timeout_s=5))

        b.serve_stream("note", note)
        for i in range(10):
            stream = await a.open("b", "note", timeout_s=1)
            await stream.send(bytes([i]), timeout_s=1)
        await asyncio.sleep(5)
        assert sorted(order) == [bytes([i]) for i in range(10)]
        assert order != sorted(order)

    run_virtual(main())


def test_bandwidth_takes_virtual_time():
    async def main():
        network = MemoryNetwork(latency_s=0.05)
        a = network.transport("a", uplink_bytes_s=1e6)
        b = network.transport("b", downlink_bytes_s=2e6)
        done = asyncio.get_running_loop().create_future()

        async def sink(remote, stream):
            while await stream.recv(timeout_s=60) is not None:
                pass
            done.set_result(now_s())

        b.serve_stream("sink", sink)
        start_s = now_s()
        async with await a.open("b", "sink", timeout_s=1) as stream:
            for _ in range(100):
                await stream.send(bytes(100_000), timeout_s=10)
        assert await done - start_s == pytest.approx(10 + 0.05 + 0.05, rel=0.01)

    run_virtual(main())


def test_a_sender_waits_for_a_slow_reader():
    async def main():
        _, a, b = pair()

        async def lazy(remote, stream):
            await asyncio.sleep(100)

        b.serve_stream("lazy", lazy)
        stream = await a.open("b", "lazy", timeout_s=1)
        with pytest.raises(DeadlineExceeded):
            for _ in range(20):
                await stream.send(bytes(MAX_MESSAGE_BYTES), timeout_s=1)

    run_virtual(main())


def test_cut_holds_messages_and_heal_delivers_them_late():
    async def main():
        network, a, b = pair()
        got = []

        async def note(remote, body):
            got.append((body, now_s()))
            return b""

        b.serve("note", note)
        network.cut("a", "b")
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "note", b"late", timeout_s=2)
        await asyncio.sleep(8)
        assert got == []
        network.heal()
        await asyncio.sleep(0.1)
        assert got == [(b"late", pytest.approx(10))]

    run_virtual(main())


def test_partition_separates_groups_only():
    async def main():
        network = MemoryNetwork()
        peers = {name: network.transport(name) for name in "abcd"}
        for peer in peers.values():
            peer.serve("echo", echo)
        network.partition("ab", "cd")
        await peers["a"].call("b", "echo", b"", timeout_s=1)
        with pytest.raises(DeadlineExceeded):
            await peers["a"].call("c", "echo", b"", timeout_s=1)
        network.heal("a", "c")
        await peers["a"].call("c", "echo", b"", timeout_s=1)
        with pytest.raises(DeadlineExceeded):
            await peers["a"].call("d", "echo", b"", timeout_s=1)
        network.heal("a")
        await peers["a"].call("d", "echo", b"", timeout_s=1)

    run_virtual(main())


def test_a_frozen_peer_stands_still_past_its_own_deadlines():
    async def main():
        network, a, _ = pair()
        stream = await a.open("b", "echo", timeout_s=1)
        waiting = asyncio.create_task(stream.recv(timeout_s=2))
        await asyncio.sleep(1)
        network.freeze("a")
        await asyncio.sleep(50)
        assert not waiting.done()
        network.thaw("a")
        with pytest.raises(DeadlineExceeded):
            await waiting
        assert now_s() == pytest.approx(51)
        await stream.send(b"again", timeout_s=1)
        assert await stream.recv(timeout_s=1) == b"again"

    run_virtual(main())


def test_a_frozen_peer_answers_after_the_thaw():
    async def main():
        network, a, _ = pair()
        network.freeze("b")
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"", timeout_s=1)
        slow = asyncio.create_task(a.call("b", "echo", b"x", timeout_s=100))
        await asyncio.sleep(1)
        network.thaw("b")
        assert await slow == b"a:x"

    run_virtual(main())


def test_killed_peer_breaks_streams_and_calls_and_may_return():
    async def main():
        network, a, b = pair()

        async def forever(remote, body):
            await asyncio.sleep(1000)
            return b""

        b.serve("forever", forever)
        stream = await a.open("b", "echo", timeout_s=1)
        await stream.send(b"before", timeout_s=1)
        pending = asyncio.create_task(a.call("b", "forever", b"", timeout_s=100))
        dead = asyncio.create_task(b.call("a", "echo", b"", timeout_s=1))
        await asyncio.sleep(0.5)
        network.kill("b")
        with pytest.raises(PeerUnreachable):
            await pending
        assert await stream.recv(timeout_s=1) == b"before"
        with pytest.raises(PeerUnreachable):
            await stream.recv(timeout_s=1)
        with pytest.raises(PeerUnreachable):
            await stream.send(b"after", timeout_s=1)
        with pytest.raises(PeerUnreachable):
            await a.call("b", "echo", b"", timeout_s=1)
        await asyncio.gather(dead, return_exceptions=True)
        hangs = asyncio.create_task(b.call("a", "echo", b"", timeout_s=1))
        await asyncio.sleep(100)
        assert not hangs.done()
        hangs.cancel()
        again = network.transport("b")
        again.serve("echo", echo)
        assert await a.call("b", "echo", b"", timeout_s=1) == b"a:"

    run_virtual(main())


def test_work_of_a_killed_peer_ends_when_it_is_cancelled_once():
    """It would say goodbye, and lose its stream, in steps that a dead process never takes."""

    async def main():
        network, a, b = pair()
        heard = []
        b.serve("bye", lambda remote, body: heard.append(body))

        async def live():
            stream = await a.open("b", "echo", timeout_s=1)
            try:
                await stream.recv(timeout_s=100)
            finally:
                try:
                    await a.call("b", "bye", b"", timeout_s=1)
                finally:
                    await stream.end(timeout_s=1)

        living = asyncio.create_task(live())
        await asyncio.sleep(0.5)
        network.kill("a")
        await asyncio.sleep(200)
        assert not living.done()
        living.cancel()
        await asyncio.wait([living], timeout=1)
        assert living.cancelled() and not heard

    run_virtual(main())


def test_a_clean_kill_looks_like_an_end():
    async def main():
        network, a, _ = pair()
        stream = await a.open("b", "echo", timeout_s=1)
        await asyncio.sleep(0.1)
        network.kill("b", clean=True)
        assert await stream.recv(timeout_s=1) is None

    run_virtual(main())


def test_reset_breaks_streams_but_not_peers():
    async def main():
        network, a, _ = pair()
        stream = await a.open("b", "echo", timeout_s=1)
        await asyncio.sleep(0.1)
        network.reset("a", "b")
        with pytest.raises(PeerUnreachable):
            await stream.recv(timeout_s=1)
        assert await a.call("b", "echo", b"", timeout_s=1) == b"a:"

    run_virtual(main())


def test_a_dropped_message_stalls_a_stream_and_loses_a_call():
    async def main():
        network, a, _ = pair()
        network.set_link("a", "b", MemoryLink(drop=1.0))
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"", timeout_s=1)
        network.set_link("a", "b", MemoryLink())
        stream = await a.open("b", "echo", timeout_s=1)
        network.set_link("a", "b", MemoryLink(drop=1.0))
        await stream.send(b"lost", timeout_s=1)
        network.set_link("a", "b", MemoryLink())
        await stream.send(b"behind it", timeout_s=1)
        with pytest.raises(DeadlineExceeded):
            await stream.recv(timeout_s=5)

    run_virtual(main())


def test_hook_sees_every_message_and_may_kill_at_the_nth():
    async def main():
        seen = []
        network, a, _ = pair()

        def hook(src, dst, method, n):
            seen.append((src, dst, method, n))
            if n == 3:
                network.kill("b")

        network.on_message = hook
        await a.call("b", "echo", b"", timeout_s=1)
        with pytest.raises(PeerUnreachable):
            await a.call("b", "echo", b"", timeout_s=1)
        assert seen == [("a", "b", "echo", 1), ("b", "a", "echo", 2), ("a", "b", "echo", 3)]

    run_virtual(main())


def test_hook_may_drop_one_message():
    async def main():
        network, a, _ = pair()
        network.on_message = lambda src, dst, method, n: n != 2
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"", timeout_s=1)
        assert await a.call("b", "echo", b"", timeout_s=1) == b"a:"

    run_virtual(main())


def test_close_lets_what_was_sent_arrive():
    async def main():
        network, a, b = pair(latency_s=0.5)
        got = []

        async def sink(remote, stream):
            while (data := await stream.recv(timeout_s=5)) is not None:
                got.append(data)
            with pytest.raises(PeerUnreachable):
                await stream.send(b"too late", timeout_s=1)

        b.serve_stream("sink", sink)
        stream = await a.open("b", "sink", timeout_s=1)
        for i in range(3):
            await stream.send(bytes([i]), timeout_s=1)
        await stream.close()
        with pytest.raises(TransportError):
            await stream.send(b"", timeout_s=1)
        await asyncio.sleep(2)
        assert got == [b"\0", b"\1", b"\2"]
        assert a.statistics().streams_open == b.statistics().streams_open == 0
        assert not network.errors

    run_virtual(main())


def test_closed_transport_is_unreachable_and_says_so_itself():
    async def main():
        _, a, b = pair()
        stream = await a.open("b", "echo", timeout_s=1)
        await asyncio.sleep(0.1)
        await b.close()
        assert await stream.recv(timeout_s=1) is None
        with pytest.raises(PeerUnreachable):
            await a.call("b", "echo", b"", timeout_s=1)
        with pytest.raises(TransportError, match="closed"):
            await b.call("a", "echo", b"", timeout_s=1)
        await b.close()

    run_virtual(main())


def test_too_long_a_message_is_the_callers_mistake():
    async def main():
        _, a, _ = pair()
        stream = await a.open("b", "echo", timeout_s=1)
        with pytest.raises(ValueError, match="split"):
            await stream.send(bytes(MAX_MESSAGE_BYTES + 1), timeout_s=1)
        with pytest.raises(ValueError, match="split"):
            await a.call("b", "echo", bytes(3 * 2**20 + 1), timeout_s=1)

    run_virtual(main())


def test_three_hundred_peers_call_each_other():
    async def main():
        network = MemoryNetwork(latency_s=0.05, jitter_s=0.05)
        peers = [network.transport(str(i)) for i in range(300)]
        for peer in peers:
            peer.serve("echo", echo)
        calls = [
            peers[i].call(str((i * k) % 300), "echo", b"x", timeout_s=5)
            for i in range(300)
            for k in (1, 7, 11)
        ]
        answers = await asyncio.gather(*calls)
        assert len(answers) == 900
        assert sum(p.statistics().messages_sent for p in peers) == 1800

    run_virtual(main())
