"""Client and server over real gRPC and TLS on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator.admission_control import Refusal
from atoll.coordinator.coordinator import Coordinator
from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import (
    BadReply,
    Busy,
    CoordinatorRefused,
    Invalid,
    NotThere,
    NotWelcome,
    WrongCertificate,
    WrongRunOrVersion,
)
from atoll.coordinator.rpc.messages import METHODS
from atoll.coordinator.run.admission import AdmissionCheck
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import KEYS_FILE, RunKeys
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import Event, RoundReport
from atoll.coordinator.service import service
from atoll.coordinator.service.server import WrongDirectory
from atoll.coordinator.service.service import MAX_RECEIVED_BYTES, Service, _receive
from atoll.dht import Identity
from atoll.optim.log.entry import Certificate, Entry, SignedEpoch, verify_key
from atoll.optim.state.outer_state import Assembly
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.recovery.sources import CoordinatorSource
from support.logs import flip

PUBLISH = next(method for method in METHODS if method.name == "Publish")


def test_joining_gives_what_a_peer_needs(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = net.client(0, version="0.1.0")
            joined = await client.join()
            assert joined.spec == kit.SPEC and joined.layout == kit.LAYOUT
            assert joined.genesis_root == kit.genesis().root()
            assert joined.epoch == b"" and joined.head.position == 0
            assert abs(joined.clock_offset_s) < 1.0
            invite = net.up.invite
            check = AdmissionCheck(invite.run_key, invite.run_id)
            check(net.swarm.identities[0].peer_id, joined.admission)
            (event,) = (await client.status()).events
            assert event.text == "joined as trainer (version 0.1.0)"

    kit.run(main())


TOKENIZER = b'{"model": 1}' * 200_000
TOKENIZER_FIELDS = {
    "tokenizer": "t.json",
    "tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest(),
    "tokenizer_bytes": len(TOKENIZER),
}


@pytest.mark.parametrize("stages", [1, 2])
def test_the_tokenizer_travels_with_the_run(kit: Any, tmp_path: Path, stages: int) -> None:
    fields = kit.SPEC.model_dump() | {"data": TOKENIZER_FIELDS, "topology": {"stages": stages}}
    spec, reads = RunSpec.from_dict(fields), []

    def read() -> bytes:
        reads.append(1)
        return TOKENIZER

    async def main() -> None:
        for _ in range(2):  # the second time the coordinator has it in its own directory
            async with kit.net(tmp_path / "run", spec=spec, tokenizer=read) as net:
                client = net.client(0)
                with pytest.raises(NotWelcome):
                    await client.fetch_tokenizer(sha256="0" * 64, size=1)
                data = (await client.join()).spec.data
                asked = {"sha256": data.tokenizer_sha256, "size": data.tokenizer_bytes}
                assert await client.fetch_tokenizer(**asked) == TOKENIZER
                with pytest.raises(BadReply, match="got another file"):
                    await client.fetch_tokenizer(**asked | {"sha256": "0" * 64})
        (tmp_path / "run" / "tokenizer.z").write_bytes(b"damaged")
        with pytest.raises(WrongDirectory, match="restore a copy"):
            async with kit.net(tmp_path / "run", spec=spec):
                pass

    kit.run(main())
    assert reads == [1]


def test_a_tokenizer_that_does_not_travel_is_not_there(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = net.client(0)
            await client.join()
            with pytest.raises(NotThere, match="does not travel with the run"):
                await client.fetch_tokenizer(sha256="0" * 64, size=1)

    kit.run(main())


def test_a_heartbeat_is_answered_with_records_of_peers(kit: Any, tmp_path: Path) -> None:
    """They come from the coordinator's node, whatever the DHT shows."""

    async def introduce(question: bytes) -> bytes:
        return b"records for " + question

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = net.client(0)
            await client.join()
            status = net.swarm.status(0)
            assert (await client.heartbeat(status, roster=b"me")).roster == b""
            net.up.coordinator.introduce_with(introduce)
            assert (await client.heartbeat(status)).roster == b""
            assert (await client.heartbeat(status, roster=b"me")).roster == b"records for me"

    kit.run(main())


def test_the_first_epoch_opens_when_enough_peers_are_ready(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two = net.client(0), net.client(1)
            await one.join(), await two.join()
            await one.heartbeat(net.swarm.status(0))
            await two.heartbeat(net.swarm.status(1, state="joining"))
            await net.up.coordinator.tick()
            assert (await one.status()).state == "waiting"
            await two.heartbeat(net.swarm.status(1))
            await net.up.coordinator.tick()
            beat = await one.heartbeat(net.swarm.status(0))
            key = net.up.coordinator.keys
            epoch = SignedEpoch.decode(beat.epoch).open(
                lambda data, signature: key.signer.public_key().verify(signature, data) is None
            )
            assert (epoch.epoch, epoch.base_position) == (0, 0)
            assert {e.peer_id for e in epoch.electorate} == {
                net.swarm.identities[i].peer_id for i in (0, 1)
            }
            assert epoch.base_chain == beat.head.chain

    kit.run(main())


def test_the_body_of_a_large_model_is_told_and_taken_in_pieces(kit: Any, tmp_path: Path) -> None:
    size = 7_100_000_001  # of 7B parameters in int8; none of it takes memory

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            _, two, _ = await net.started()
            entry, _ = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            net.up.coordinator.log.replica.store.append_header(
                epoch=0,
                position=0,
                entry=entry.encode(),
                certificate=b"votes",
                body_bytes=size,
                chain=entry.chain,
            )
            (header,) = [f async for f in two.fetch_entries(0, 1)]
            assert header.body_bytes == size

    async def pieces() -> AsyncIterator[pb.PublishRequest]:
        for _ in range(3):
            yield pb.PublishRequest(chunk=b"x" * (1 << 20))

    kit.run(main())
    with pytest.raises(Refusal, match=f"expected {size} bytes, got {3 << 20}"):
        kit.run(_receive(pieces(), size))
    header = pb.PublishHeader(body_bytes=size)
    assert pb.PublishHeader.FromString(header.SerializeToString()).body_bytes == size


async def body_from(client: CoordinatorClient, position: int, start: int, size: int) -> bytes:
    body = bytearray(size)
    await client.fetch_body(position, start, memoryview(body))
    return bytes(body)


def test_entries_are_followed_and_served(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            state = kit.genesis()
            sent = []
            for position in range(5):
                head = net.up.coordinator.log.head()
                entry, body = net.swarm.entry(net.run_id, head)
                assert await net.publish(one, entry, body)
                assert not await net.publish(two, entry, body)
                state = kit.REPLAY.next_state(state, entry, body)
                sent.append((entry, body))
                assert net.up.coordinator.log.head().position == position + 1
            assert net.up.coordinator.log.replica.state.root() == state.root()
            got = [fetched async for fetched in two.fetch_entries(1, 100)]
            assert [f.entry for f in got] == [entry.encode() for entry, _ in sent[1:]]
            assert [f.position async for f in two.fetch_entries(0, 2)] == [0, 1]
            for position, (_, body) in enumerate(sent):
                assert await body_from(two, position, 0, len(body)) == body
                assert await body_from(two, position, 3, len(body) - 4) == body[3:-1]
            with pytest.raises(BadReply, match="expected 1001 bytes of a body"):
                await body_from(two, 4, len(sent[4][1]) - 1000, 1001)
            with pytest.raises(NotThere):
                await body_from(two, 5, 0, 1)
            with pytest.raises(NotThere):
                await body_from(two, 2**62, 0, 1)
            status = await two.status()
            assert (status.position, status.tokens_total, status.loss) == (5, 1500, 2.5)
            assert [r.position for r in status.history] == [1, 2, 3, 4, 5]
            early = await two.status(after=3)
            assert (early.position, early.tokens_total) == (3, 900)
            assert early.history == status.history[:3]
            assert sum(given.rounds for given in early.contributions) > 0

    kit.run(main())


def test_few_look_at_earlier_rounds_at_once(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, _, _ = await net.started()
            monkeypatch.setattr("atoll.coordinator.service.service.MAX_LOOKING_BACK", 0)
            with pytest.raises(Busy, match="too many look at earlier rounds"):
                await one.status(after=1)
            assert (await one.status()).position == 0

    kit.run(main())


def test_an_update_that_the_disk_has_spoiled_is_served_to_nobody(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            for _ in range(3):
                entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
                assert await net.publish(one, entry, body)
            flip(tmp_path / "run" / "log", "bodies", "data", "position = 1")
            with pytest.raises(NotThere, match="entry 1 was damaged"):
                await body_from(two, 1, 0, len(body))
            assert [f.position async for f in two.fetch_entries(2, 1)] == [2]
            assert (await two.fetch_snapshot()).first_body == 2

    kit.run(main())


def test_the_runs_key_signs_the_root_of_a_snapshot_that_is_served(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            replica = net.up.coordinator.log.replica
            keys = RunKeys.load_or_create(tmp_path / "run" / KEYS_FILE)
            verify_run = partial(verify_key, keys.run_public_key)
            signed = (await one.fetch_snapshot()).signed_root
            assert signed is not None and signed.holds(net.run_id, verify_run)
            assert (signed.position, signed.chain) == (0, replica.chain)
            assert not signed.holds(b"x" * 32, verify_run)
            replica.standing = dataclasses.replace(replica.standing, diverged="by a fault")
            assert (await one.fetch_snapshot()).signed_root is None

    kit.run(main())


def test_a_joiner_fetches_the_genesis_and_newer_snapshots(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            for _ in range(2):
                entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
                await net.publish(one, entry, body)
            await net.up.coordinator.log.replica.saved()
            for position, expected in (
                (0, kit.genesis()),
                (None, net.up.coordinator.log.replica.state),
            ):
                info = await two.fetch_snapshot(position)
                assembly = Assembly(
                    layout=info.layout,
                    position=info.position,
                    leaf_digests=info.leaf_digests,
                    root=info.root,
                )
                async for index, data in two.fetch_leaves(info.position):
                    assembly.add(index, data)
                assert assembly.finish().root() == expected.root()
            assert [i async for i, _ in two.fetch_leaves(0, start=1, count=1)] == [1]
            with pytest.raises(NotThere, match="snapshot 1 is not here"):
                await two.fetch_snapshot(1)
            with pytest.raises(NotThere):
                [_ async for _ in two.fetch_leaves(99)]

    kit.run(main())


def test_a_coordinator_that_repeats_a_leaf_is_read_no_further(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any) -> AsyncIterator[pb.FetchReply]:
        while True:
            yield pb.FetchReply(leaf=pb.Leaf(index=0, data=b"x"))

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            _, two, _ = await net.started()
            monkeypatch.setattr(Service, "_leaves", endless)
            with pytest.raises(BadReply, match="leaf 0 out of turn"):
                [_ async for _ in two.fetch_leaves(0, 0, 2)]

    kit.run(main())


def test_few_newcomers_read_from_the_coordinator_at_once(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            await net.publish(one, entry, body)
            into = memoryview(bytearray(len(body)))
            monkeypatch.setattr(service, "MAX_GIVING_WAY", 1)
            for _ in range(2):  # a place is given back
                assert [i async for i, _ in two.fetch_leaves(0, 1, 1, gives_way=True)] == [1]
                await two.fetch_body(0, 0, into, gives_way=True)
            assert into == body
            monkeypatch.setattr(service, "MAX_GIVING_WAY", 0)
            with pytest.raises(Busy):
                await anext(two.fetch_leaves(0, 1, 1, gives_way=True))
            with pytest.raises(Busy):
                await two.fetch_body(0, 0, into, gives_way=True)
            source = CoordinatorSource(two, b"", snapshot_every=2)
            with pytest.raises(GaveWay):
                await source.body(0, 0, into, gives_way=True)
            with pytest.raises(GaveWay):
                await anext(source.leaves(0, [1]))
            await source.body(0, 0, into)  # it has nobody else
            assert [i async for i, _ in two.fetch_leaves(0, 1, 1)] == [1]

    kit.run(main())


def test_heartbeats_become_status_and_rounds(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, three = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            trace = RoundReport(
                position=0, included=True, seconds={"send": 1.0, "wait": 2.0}, wire_bytes_sent=7
            )
            await one.heartbeat(net.swarm.status(0), traces=[trace])
            await net.publish(one, entry, body)
            later = dataclasses.replace(trace, seconds={"send": 3.0}, wire_bytes_sent=5)
            busy = net.swarm.status(1, state="training", tokens_per_s=50.0, utilisation=0.5)
            await two.heartbeat(busy, traces=[later], events=[Event(at=0.0, text="hello")])
            await three.heartbeat(net.swarm.status(2), leaving=True)
            status = await one.status()
            (summary,) = status.history
            assert summary.seconds == {"send": 2.0, "wait": 1.0} and summary.wire_bytes == 12
            assert status.tokens_per_s == 50.0
            assert [p.state for p in sorted(status.peers, key=lambda p: p.state)] == [
                "left",
                "ready",
                "training",
            ]
            texts = [(e.source, e.text) for e in status.events]
            assert (net.swarm.identities[1].peer_id, "hello") in texts
            assert (net.swarm.identities[2].peer_id, "left") in texts

    kit.run(main())


def test_rounds_of_an_absence_have_no_time_and_no_validation_loss(kit: Any, tmp_path: Path) -> None:
    """They were long ago; what the coordinator learns at once looked like a run at full speed."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clients = await net.started()
            for index, client in enumerate(clients):
                status = net.swarm.status(index, position=3 if index else 4, valid_loss=2.0)
                await client.heartbeat(status)
            for _ in range(4):
                entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
                await net.publish(clients[0], entry, body)
            rows = (await clients[0].status()).history
            assert [row.late for row in rows] == [True, True, False, False]
            assert [row.valid_loss for row in rows] == [None, None, 2.0, 2.0]

    kit.run(main())


def test_an_event_has_the_time_at_which_it_happened(kit: Any, tmp_path: Path) -> None:
    """Not that of the coordinator's return, unless the peer's clock is out of the question."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            now_s = net.up.coordinator.now_s()
            times_s = (now_s - 600.0, now_s + 600.0, 0.0)
            events = [Event(at=at_s, text=f"{at_s}") for at_s in times_s]
            await one.heartbeat(net.swarm.status(0), events=events)
            status = await one.status()
            at_s = {event.text: event.at for event in status.events}
            past, future, never = (at_s[event.text] for event in events)
            assert past == times_s[0]
            assert list(status.events) == sorted(status.events, key=lambda event: event.at)
            assert now_s <= future <= status.now and now_s <= never <= status.now

    kit.run(main())


def test_a_full_disk_is_reported_once_and_the_run_continues(kit: Any, tmp_path: Path) -> None:
    """It was a traceback every half second, and peers thought that they were out of touch."""

    def limit_disk(coordinator: Coordinator, pages: int) -> None:
        for database in (coordinator.log.replica.store, coordinator.log.rounds._history):
            database._db.execute(f"PRAGMA max_page_count = {pages}")  # no file gets below its size

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            coordinator = net.up.coordinator
            ahead = net.swarm.status(0, position=1)
            assert (await one.heartbeat(ahead)).publish_from == 0
            limit_disk(coordinator, 1)
            entry, body = net.swarm.entry(net.run_id, coordinator.log.head())
            for client in (one, two, one):
                with pytest.raises(CoordinatorRefused, match=r"disk.*full") as raised:
                    await net.publish(client, entry, body)
                assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            long_ones = [Event(at=0.0, text="x" * 1000)] * 16
            beat = await one.heartbeat(ahead, events=long_ones)
            assert beat.publish_from is None
            await coordinator.tick()
            told = [e.text for e in (await one.status()).events if e.level == "error"]
            assert len(told) == 1 and "free space on its disk" in told[0]
            limit_disk(coordinator, 2**31)
            assert await net.publish(two, entry, body)
            assert coordinator.log.head().position == 1

    kit.run(main())


def test_the_coordinator_asks_one_peer_for_what_it_lacks(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clients = await net.started()
            asked = []
            for index, client in enumerate(clients):
                beat = await client.heartbeat(net.swarm.status(index, position=1))
                asked.append(beat.publish_from)
            assert asked == [0, None, None]
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            assert await net.publish(clients[0], entry, body)
            beat = await clients[0].heartbeat(net.swarm.status(0, position=1))
            assert beat.publish_from is None and beat.head.position == 1

    kit.run(main())


def test_the_run_finishes_with_a_checkpoint(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            for _ in range(6):
                entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
                await net.publish(one, entry, body)
            assert (await one.heartbeat(net.swarm.status(0, position=6))).finished
            assert (await one.status()).state == "finished"
            coordinator = net.up.coordinator
        checkpoint = kit.load_checkpoint(coordinator.last_checkpoint())
        assert checkpoint.position == 6 and checkpoint.spec == kit.SPEC
        assert checkpoint.chain == coordinator.log.head().chain
        assert checkpoint.state.root() == coordinator.log.replica.state.root()

    kit.run(main())


# Those who are not welcome


def other_invite(invite: Invite, **changes: Any) -> Invite:
    return dataclasses.replace(invite, **changes)


def test_strangers_are_turned_away(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            invite, identity = net.up.invite, Identity.ephemeral()

            async def attempt(changed: Invite) -> None:
                client = CoordinatorClient(changed, identity)
                try:
                    await client.join()
                finally:
                    await client.close()

            with pytest.raises(NotWelcome, match="token of this run's invite"):
                await attempt(other_invite(invite, token=b"guess"))
            with pytest.raises(WrongRunOrVersion, match="invite is of another run"):
                await attempt(other_invite(invite, run_id=b"x" * 32))
            with pytest.raises(BadReply, match="spec of the invite's run"):
                await attempt(other_invite(invite, run_key=b"k" * 32))
            with pytest.raises(WrongCertificate, match="another coordinator or an attacker"):
                await attempt(other_invite(invite, tls_sha256=b"t" * 32))
            with pytest.raises(NotWelcome, match="token"):
                await StatusClient(other_invite(invite, token=b"")).status()
            with pytest.raises(WrongRunOrVersion, match="invite is of another run"):
                await StatusClient(other_invite(invite, run_id=b"x" * 32)).status()

    kit.run(main())


def test_a_proof_by_another_key_or_an_old_nonce(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            victim, thief = net.client(0), net.client(1)
            peer_id = net.swarm.identities[0].peer_id
            nonce = net.up.coordinator.admission.challenge(peer_id)
            request = thief._join_request(net.swarm.identities[1], nonce)
            request.peer_id = peer_id
            with pytest.raises(NotWelcome, match="signed by the key of the peer id"):
                await thief._call("Join", request)
            forged = hashlib.sha256(b"nonce").digest()
            with pytest.raises(NotWelcome, match="fresh nonce"):
                await victim._call("Join", victim._join_request(net.swarm.identities[0], forged))

    kit.run(main())


def test_sessions_are_their_owners_only(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two = net.client(0), net.client(1)
            with pytest.raises(NotWelcome, match="join first"):
                await one.heartbeat(net.swarm.status(0))
            await one.join(), await two.join()
            with pytest.raises(NotWelcome, match="status of the peer itself"):
                await one.heartbeat(net.swarm.status(1))
            two._session = one._session
            with pytest.raises(NotWelcome, match="current session"):
                await two.heartbeat(net.swarm.status(1))
            with pytest.raises(NotWelcome):
                [_ async for _ in two.fetch_entries(0, 1)]

    kit.run(main())


# Those who send rubbish


def test_entries_without_a_certificate_are_refused(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            head = net.up.coordinator.log.head()
            entry, body = net.swarm.entry(net.run_id, head)

            async def send(entry: Any, certificate: bytes, body: bytes) -> bool:
                published = await one.publish(
                    epoch=0,
                    position=0,
                    entry=entry if isinstance(entry, bytes) else entry.encode(),
                    certificate=certificate,
                    body=body,
                )
                return published.accepted

            good = net.swarm.certify(entry).encode()
            with pytest.raises(Invalid, match="quorum"):
                await send(entry, net.swarm.certify(entry, [0]).encode(), body)
            with pytest.raises(Invalid, match="forged"):
                other, _ = net.swarm.entry(net.run_id, head, lr=0.5)
                await send(other, good, body)
            with pytest.raises(Invalid, match="another digest"):
                await send(entry, good, bytes(len(body)))
            with pytest.raises(Invalid, match="expected a body of"):
                await send(entry, good, body + b"x")
            with pytest.raises(Invalid, match=r"not msgpack|not a valid record"):
                await send(b"\xc1rubbish", good, body)
            with pytest.raises(Invalid, match="certificate: expected 1 to"):
                await send(entry, b"", body)
            with pytest.raises(Invalid, match="run"):
                alien, _ = net.swarm.entry(b"x" * 32, head)
                await send(alien, net.swarm.certify(alien).encode(), body)
            short, _ = net.swarm.entry(net.run_id, head)
            short = short.model_copy(update={"parts": ()})
            with pytest.raises(Invalid):
                await send(short, Certificate(attempt=0, votes=()).encode(), b"")
            ahead, _ = net.swarm.entry(net.run_id, dataclasses.replace(head, position=3))
            assert not await send(ahead, good, body)
            assert net.up.coordinator.log.head() == head
            assert await send(entry, good, body)

    kit.run(main())


@pytest.mark.parametrize("parts", [[], ["chunk"], ["header"], ["header", "header"]])
def test_a_stream_out_of_order_is_refused(kit: Any, tmp_path: Path, parts: list[str]) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            header = pb.PublishHeader(
                auth=one._auth(),
                entry=entry.encode(),
                certificate=net.swarm.certify(entry).encode(),
                body_bytes=len(body),
            )
            messages = {
                "chunk": pb.PublishRequest(chunk=b"x"),
                "header": pb.PublishRequest(header=header),
            }
            stream = (await one._connect()).stream_stream(
                PUBLISH.path,
                request_serializer=pb.PublishRequest.SerializeToString,
                response_deserializer=pb.PublishReply.FromString,
            )(iter([messages[part] for part in parts]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(stream)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await net.publish(one, entry, body)

    kit.run(main())


def test_hostile_messages_harm_only_their_own_call(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, *_ = await net.started()
            channel = await one._connect()
            for method in METHODS:
                for raw in (b"", b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", bytes(5 << 20)):
                    kind = "stream" if method.streams_in else "unary"
                    kind += "_stream" if method.streams_out else "_unary"
                    call = getattr(channel, kind)(method.path)
                    given = iter([raw]) if method.streams_in else raw
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await answer(call(given, timeout=5))
                        raise AssertionError(f"{method.name} took {raw[:10]!r}")
                    assert caught.value.code() in {
                        grpc.StatusCode.INVALID_ARGUMENT,
                        grpc.StatusCode.UNAUTHENTICATED,
                        grpc.StatusCode.PERMISSION_DENIED,
                        grpc.StatusCode.FAILED_PRECONDITION,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                    }
            auth = one._auth()
            for request in (
                pb.HeartbeatRequest(auth=auth, status=b"{}"),
                pb.HeartbeatRequest(auth=auth, status=b"[" * 100_000),
                pb.HeartbeatRequest(
                    auth=auth, status=net.swarm.status(0).to_json(), traces=[b"{}"]
                ),
                pb.HeartbeatRequest(
                    auth=auth, status=net.swarm.status(0).to_json(), events=[b"{}"] * 33
                ),
            ):
                with pytest.raises(Invalid):
                    await one._call("Heartbeat", request)
            with pytest.raises(Invalid, match="entries, body, snapshot, leaves or tokenizer"):
                [_ async for _ in one._stream_out("Fetch", pb.FetchRequest(auth=auth))]
            huge = pb.LeafRange(position=0, start=2**32 - 1, count=2**32 - 1)
            request = pb.FetchRequest(auth=auth, leaves=huge)
            assert [_ async for _ in one._stream_out("Fetch", request)] == []
            far = pb.EntryRange(start=2**63, count=2**32 - 1)
            request = pb.FetchRequest(auth=auth, entries=far)
            assert [_ async for _ in one._stream_out("Fetch", request)] == []
            beyond = pb.BodyRange(position=2**64 - 1, start=2**64 - 1, stop=0)
            with pytest.raises(NotThere):
                request = pb.FetchRequest(auth=auth, body=beyond)
                [_ async for _ in one._stream_out("Fetch", request)]
            assert (await one.status()).state == "training"

    kit.run(main())


async def answer(call: Any) -> None:
    if hasattr(call, "__await__"):
        await call
    else:
        async for _ in call:
            pass


def test_bodies_on_their_way_are_bounded_in_bytes(kit: Any, tmp_path: Path) -> None:
    """A body of any length comes alone; others have to leave room in memory."""

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            await net.started()
            service = Service(net.up.coordinator)
            entry, _ = net.swarm.entry(net.run_id, net.up.coordinator.log.head())

            def of(position: int, body_bytes: int) -> Entry:
                part = entry.parts[0].model_copy(update={"wire_bytes": body_bytes})
                return entry.model_copy(update={"position": position, "parts": (part,)})

            with service._slot(of(0, 7 << 30)):
                with pytest.raises(Refusal, match="too many entries"), service._slot(of(1, 1)):
                    pass
            with service._slot(of(0, MAX_RECEIVED_BYTES // 2)):
                with service._slot(of(1, MAX_RECEIVED_BYTES // 2)):
                    assert len(service._receiving) == 2
            assert not service._receiving

    kit.run(main())


def test_a_publisher_that_stalls_is_given_up(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.coordinator.service.service.PROGRESS_TIMEOUT_S", 0.2)

    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            one, two, _ = await net.started()
            entry, body = net.swarm.entry(net.run_id, net.up.coordinator.log.head())
            stream = (await one._connect()).stream_stream(
                PUBLISH.path, request_serializer=pb.PublishRequest.SerializeToString
            )()
            header = pb.PublishHeader(
                auth=one._auth(),
                entry=entry.encode(),
                certificate=net.swarm.certify(entry).encode(),
                body_bytes=len(body),
            )
            await stream.write(pb.PublishRequest(header=header))
            with pytest.raises(grpc.aio.AioRpcError, match="nothing arrived"):
                await answer(stream)
            assert await net.publish(two, entry, body)

    kit.run(main())


def test_a_peer_is_dialed_back_at_its_own_address(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            (one, *_) = await net.started()
            nonce = bytes(range(16))

            async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(nonce)
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                assert await one.probe(port, nonce) == ("127.0.0.1", True)
                assert await one.probe(port, bytes(16)) == ("127.0.0.1", False)
            assert await one.probe(port, nonce) == ("127.0.0.1", False)  # nobody listens there

    kit.run(main())


@pytest.mark.parametrize(("port", "nonce"), [(0, bytes(16)), (70_000, bytes(16)), (1, b"short")])
def test_a_malformed_probe_is_refused(kit: Any, tmp_path: Path, port: int, nonce: bytes) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            (one, *_) = await net.started()
            with pytest.raises(Invalid, match="a port and a nonce"):
                await one.probe(port, nonce)

    kit.run(main())


def test_nobody_is_dialed_back_before_it_has_joined(kit: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            with pytest.raises(NotWelcome):
                await net.client(0).probe(1, bytes(16))

    kit.run(main())
