"""A peer and its coordinator: the log, the replica and the rounds are real, the client is not."""

import asyncio
import time
import types

import grpc
import pytest

from atoll.coordinator.rpc.client import Beat, Published
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable, Evicted, NotWelcome
from atoll.coordinator.run.status import PeerStatus
from atoll.dht import clock
from atoll.dht.tasks import end
from atoll.dht.testing.memory import run_virtual
from atoll.optim.log.store import StoreHead
from atoll.peer.cli.main import exit_code
from atoll.peer.daemon.log_run import Publisher
from atoll.peer.daemon.reporting import MAX_PAUSE_S, MAX_SENT, Heartbeats, Reporter
from atoll.peer.recovery.sources import CoordinatorSource
from support.environment import environment, rounds_view, started
from support.swarm import Swarm, signed_epoch

AWAY = CoordinatorUnreachable("127.0.0.1:9: connection refused")


class Client:
    """A coordinator that answers what the test says and keeps what it is told."""

    def __init__(self):
        self.head = StoreHead(epoch=1, position=0, chain=bytes(32))
        self.failures = []  # raised by the next heartbeats
        self.answer = {}
        self.beats, self.published, self.joins = [], [], 0
        self.refuse_from = 1 << 40  # entries from here on do not get through
        self.publishing = lambda: None  # called as an entry comes
        self.evictions = b""
        self.clock_offset_s = self.clock_error_s = 0.0

    async def heartbeat(self, status, *, events, traces, leaving, retired, roster=b"", evidence):
        if self.failures:
            raise self.failures.pop(0)
        self.beats.append(
            types.SimpleNamespace(
                status=status,
                events=events,
                traces=traces,
                leaving=leaving,
                retired=retired,
                evidence=evidence,
            )
        )
        answer = {"epoch": b"", "bootstrap": (), "publish_from": None, "admission": b""}
        return Beat(head=self.head, finished=False, heartbeat_s=1.0, **(answer | self.answer))

    async def join(self):
        self.joins += 1
        return types.SimpleNamespace(admission=b"new")

    async def publish(self, *, epoch, position, entry, certificate, body):
        self.publishing()
        if position >= self.refuse_from:
            raise AWAY
        self.published.append((position, len(body)))
        self.head = StoreHead(epoch=epoch, position=position + 1, chain=bytes(32))
        return Published(accepted=True, head=self.head)


class Peer:
    """One peer of a swarm of two, in touch with a `Client`."""

    def __init__(self, swarm_peer):
        self.peer = swarm_peer
        self.client = Client()
        self.source = CoordinatorSource(self.client, b"", snapshot_every=2)
        self.said, self.joined, self.tasks, self.evictions = [], [], [], []
        self.catch_ups = 0
        self.env = environment(
            swarm_peer.ctx.me,
            client=self.client,
            enrolment=types.SimpleNamespace(
                renew=lambda joined, client: self.joined.append(joined),
                keep_evictions=self.evictions.append,
            ),
            tasks=types.SimpleNamespace(spawn=self.spawn),
            report=lambda level, text, key=None: self.said.append(f"{level}: {text}"),
        )
        self.node, self.outbox = self.env.node, self.env.outbox
        rounds = swarm_peer.rounds
        rounds.kick_catch_up = self.note_catch_up
        replica = swarm_peer.replica
        self.publisher = Publisher(self.env, self.source, replica, rounds)
        reporter = Reporter(self.env, replica, started(), rounds_view(rounds))
        self.failures = []
        self.heartbeats = Heartbeats(
            self.env, reporter, self.publisher, in_touch=True, on_evicted=self.failures.append
        )

    def spawn(self, work, *arguments):
        self.tasks.append(asyncio.create_task(work(*arguments)))

    def note_catch_up(self):
        self.catch_ups += 1


def with_peer(tmp_path, use, *, position=0, body_budget_bytes=None):
    """Run ``use(peer)`` once the swarm has that many entries."""

    async def main():
        swarm = Swarm(tmp_path, body_budget_bytes=body_budget_bytes)
        try:
            peers = await swarm.start(2)
            await swarm.until(lambda: all(p.replica.position >= position for p in peers))
            for peer in peers:  # nothing is decided while the test looks
                await end(*peer.tasks)
            await use(Peer(peers[0]))
        finally:
            await swarm.stop()

    run_virtual(main())


def test_a_list_of_evictions_is_kept_with_each_answer(tmp_path):
    async def use(peer):
        peer.client.evictions = b"list"
        await peer.heartbeats.beat()
        assert peer.evictions == [b"list"]

    with_peer(tmp_path, use)


def test_a_clock_that_has_jumped_is_followed(tmp_path):
    async def use(peer):
        peer.client.clock_offset_s = -104.0
        await peer.heartbeats.beat()
        assert clock.now_s() - time.time() == pytest.approx(-104.0, abs=1.0)

    try:
        with_peer(tmp_path, use)
    finally:
        clock.set_offset(0.0)


def test_evidence_is_handed_in_once_although_a_heartbeat_fails(tmp_path):
    async def use(peer):
        peer.outbox.evidence.extend([b"one", b"two"])
        peer.client.failures = [AWAY]
        with pytest.raises(CoordinatorUnreachable):
            await peer.heartbeats.beat()
        for _ in range(3):
            await peer.heartbeats.beat()
        assert [beat.evidence for beat in peer.client.beats] == [b"one", b"two", b""]

    with_peer(tmp_path, use)


def test_a_heartbeat_tells_status_and_events_once(tmp_path):
    async def use(peer):
        for i in range(MAX_SENT + 3):
            peer.outbox.note("info", f"event {i}", float(i))
        await peer.heartbeats.beat()
        await peer.heartbeats.beat(leaving=True)
        first, second = peer.client.beats
        assert isinstance(first.status, PeerStatus)
        assert [len(first.events), len(second.events)] == [MAX_SENT, 3]
        assert [first.leaving, second.leaving] == [False, True]

    with_peer(tmp_path, use)


def test_who_leaves_says_whether_it_has_retired(tmp_path):
    async def use(peer):
        await peer.heartbeats.beat(leaving=True)
        await peer.peer.rounds.retire()
        await peer.heartbeats.beat()
        await peer.heartbeats.beat(leaving=True)
        assert [beat.retired for beat in peer.client.beats] == [False, False, True]

    with_peer(tmp_path, use, position=1)


def test_what_could_not_be_told_is_told_next_time_in_order(tmp_path):
    async def use(peer):
        peer.client.failures = [AWAY]
        for text in ("one", "two"):
            peer.outbox.note("info", text, 1.0)
        with pytest.raises(CoordinatorUnreachable):
            await peer.heartbeats.beat()
        peer.outbox.note("info", "three", 2.0)
        await peer.heartbeats.beat()
        assert [event.text for event in peer.client.beats[0].events] == ["one", "two", "three"]

    with_peer(tmp_path, use)


def test_a_coordinator_that_is_away_is_said_once_and_asked_ever_less(tmp_path):
    async def use(peer):
        peer.client.failures = [AWAY] * 12
        keeping = asyncio.create_task(peer.heartbeats.keep())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while peer.client.failures:
            await asyncio.sleep(0.5)
        assert not peer.heartbeats.in_touch
        assert loop.time() - began_s > 6 * MAX_PAUSE_S
        await asyncio.sleep(MAX_PAUSE_S + 5)
        assert peer.heartbeats.in_touch
        assert [line.split(",")[0] for line in peer.said] == [
            "warning: out of touch with the coordinator",
            "info: in touch with the coordinator again",
        ]
        assert len(peer.client.beats) >= 4  # back to one a second
        await end(keeping)

    with_peer(tmp_path, use)


def test_a_coordinator_that_has_forgotten_us_is_joined_again(tmp_path):
    async def use(peer):
        peer.client.failures = [NotWelcome(grpc.StatusCode.UNAUTHENTICATED, "unknown session")]
        keeping = asyncio.create_task(peer.heartbeats.keep())
        await asyncio.sleep(0.5)
        assert (peer.client.joins, len(peer.joined), len(peer.client.beats)) == (1, 1, 1)
        assert peer.node.transport.admission == b"new"
        assert peer.heartbeats.in_touch
        await end(keeping)

    with_peer(tmp_path, use)


def test_an_evicted_peer_asks_no_more_and_knows_why(tmp_path):
    async def use(peer):
        why = "the organiser has evicted this peer: noise"
        peer.client.failures = [Evicted(grpc.StatusCode.ABORTED, why)]
        keeping = asyncio.create_task(peer.heartbeats.keep())
        await asyncio.sleep(600.0)
        assert [str(error) for error in peer.failures] == [why]
        assert (peer.client.joins, len(peer.client.beats)) == (0, 0)
        assert peer.said == []
        assert exit_code(peer.failures[0]) == 2
        await end(keeping)

    with_peer(tmp_path, use)


def test_a_renewed_admission_and_new_addresses_are_used(tmp_path):
    async def use(peer):
        peer.client.answer = {"admission": b"renewed", "bootstrap": ("/new",)}
        await peer.heartbeats.beat()
        assert peer.node.transport.admission == b"renewed"
        assert peer.node.bootstrap == ("/new",)
        peer.client.answer = {}
        await peer.heartbeats.beat()
        assert peer.node.transport.admission == b"renewed"

    with_peer(tmp_path, use)


def test_a_coordinator_that_is_ahead_makes_us_catch_up(tmp_path):
    async def use(peer):
        there = peer.peer.replica.position
        for ahead, kicks in ((1, 0), (2, 1)):  # one ahead is a commit on its way here
            peer.client.head = StoreHead(epoch=1, position=there + ahead, chain=bytes(32))
            await peer.heartbeats.beat()
            assert peer.catch_ups == kicks

    with_peer(tmp_path, use, position=2)


def test_a_new_epoch_is_adopted_and_a_forged_one_is_not(tmp_path):
    async def use(peer):
        replica = peer.peer.replica
        record = signed_epoch(2, replica.position, replica.chain, [peer.peer.ctx.me])
        for forged in (record[:-1] + bytes([record[-1] ^ 1]), b"rubbish"):
            peer.client.answer = {"epoch": forged}
            await peer.heartbeats.beat()
            assert replica.epoch == 1
        peer.client.answer = {"epoch": record}
        await peer.heartbeats.beat()
        assert replica.epoch == 2
        assert tuple(replica.electorate) == (peer.peer.ctx.me,)
        assert peer.catch_ups == 0

    with_peer(tmp_path, use, position=2)


def test_the_coordinator_gets_what_it_asks_for_in_order(tmp_path):
    async def use(peer):
        there = peer.peer.replica.position
        peer.client.answer = {"publish_from": 1}
        await peer.heartbeats.beat()
        await peer.heartbeats.beat()  # asks again while the first answer is under way
        assert len(peer.tasks) == 1
        await asyncio.gather(*peer.tasks)
        assert [position for position, _ in peer.client.published] == list(range(1, there))
        assert all(size > 0 for _, size in peer.client.published)
        assert peer.publisher.stored_all()
        assert not peer.publisher.stored(there + 1)

    with_peer(tmp_path, use, position=4)


def test_it_says_while_an_entry_is_on_its_way(tmp_path):
    async def use(peer):
        peer.client.answer, peer.client.refuse_from, seen = {"publish_from": 0}, 2, []
        peer.client.publishing = lambda: seen.append(peer.publisher.storing())
        await peer.heartbeats.beat()
        await asyncio.gather(*peer.tasks)
        assert seen == [True, True, True]
        assert not peer.publisher.storing()

    with_peer(tmp_path, use, position=4)


def test_sending_ends_at_the_first_entry_that_does_not_get_through(tmp_path):
    async def use(peer):
        peer.client.answer, peer.client.refuse_from = {"publish_from": 0}, 2
        await peer.heartbeats.beat()
        await asyncio.gather(*peer.tasks)
        assert [position for position, _ in peer.client.published] == [0, 1]
        assert not peer.publisher.stored_all()
        peer.client.answer, peer.client.refuse_from = {"publish_from": 2}, 1 << 40
        await peer.heartbeats.beat()
        await asyncio.gather(*peer.tasks)
        assert peer.publisher.stored_all()

    with_peer(tmp_path, use, position=4)


def test_a_body_that_was_pruned_is_said_once(tmp_path):
    async def use(peer):
        peer.client.answer = {"publish_from": 0}
        for _ in range(2):
            await peer.heartbeats.beat()
            await asyncio.gather(*peer.tasks)
        assert peer.client.published == []
        (line,) = peer.said
        assert "lacks entry 0" in line
        assert "round.log_mb" in line

    with_peer(tmp_path, use, position=12, body_budget_bytes=1)


def test_an_entry_that_we_led_is_sent_at_once(tmp_path):
    async def use(peer):
        record = peer.peer.replica.store.get(0)
        entry = types.SimpleNamespace(epoch=1, position=0, encode=lambda: record.entry)
        certificate = types.SimpleNamespace(encode=lambda: record.certificate)
        peer.publisher.on_led(entry, certificate, b"body")
        await asyncio.gather(*peer.tasks)
        assert peer.client.published == [(0, 4)]
        assert peer.source.position == 1

    with_peer(tmp_path, use, position=1)
