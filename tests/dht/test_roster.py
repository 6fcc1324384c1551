import asyncio
import gc
from dataclasses import dataclass, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dht import clock
from atoll.dht.identity import Identity
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import (
    MAX_TTL_S,
    VERSION,
    DhtRoster,
    PeerRecord,
    RecordError,
    RosterError,
    RosterValidator,
    open_record,
    sign_record,
)
from atoll.dht.tasks import end
from atoll.dht.testing import MemoryBoard, run_virtual
from atoll.dht.transport import Refused

RUN = "run-a"
KEY = b"k" * 20
IDENTITY = Identity.ephemeral()


def record(identity=IDENTITY, **changes):
    plain = PeerRecord(
        peer_id=identity.peer_id,
        addresses=("/ip4/10.0.0.1/tcp/4000",),
        incarnation="0123456789abcdef" * 2,
        role="trainer",
        epoch=1,
        position=42,
        tokens_per_s=1234.5,
        uplink_mbit_s=20.0,
        downlink_mbit_s=100.0,
        ready_in_s=3.5,
        step_s=0.25,
        protocol=1,
        expires_at=clock.now_s() + 30,
    )
    return replace(plain, **changes)


def signed(r=None, identity=IDENTITY, run_id=RUN, credential=b"ticket"):
    return sign_record(r or record(), identity, run_id=run_id, credential=credential)


def test_records_round_trip():
    r = record()
    assert open_record(signed(r), run_id=RUN) == r


def test_a_record_of_another_run_is_refused():
    with pytest.raises(RecordError, match="not signed"):
        open_record(signed(), run_id="run-b")


def test_a_record_in_the_name_of_another_peer_is_refused():
    with pytest.raises(RecordError, match="not signed"):
        open_record(signed(record(Identity.ephemeral())), run_id=RUN)


def test_a_swapped_credential_is_refused():
    parts = msgpack.unpackb(signed())
    parts[2] = b"another's ticket"
    with pytest.raises(RecordError, match="not signed"):
        open_record(msgpack.packb(parts), run_id=RUN)


def test_an_expired_admission_is_refused_by_the_reader():
    def check(peer, credential, use=""):
        raise Refused(RefusalCode.NOT_ADMITTED, f"{credential!r} ran out")

    with pytest.raises(RecordError, match="ran out"):
        open_record(signed(), run_id=RUN, check=check)


def test_a_record_names_no_role_that_its_admission_does_not_allow():
    asked = []

    def check(peer, credential, use=""):
        asked.append(use)

    open_record(signed(record(role="follower")), run_id=RUN, check=check)
    open_record(signed(), run_id=RUN, check=check)
    assert asked == ["record:follower", "record:trainer"]


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ("no multiaddr",)},
        {"addresses": ("/" + "x" * 300,)},
        {"addresses": tuple("/ip4/1.2.3.4" for _ in range(17))},
        {"incarnation": "xyz"},
        {"incarnation": "F" * 32},
        {"role": "boss"},
        {"epoch": -1},
        {"position": 1.5},
        {"position": True},
        {"position": 1 << 60},
        {"tokens_per_s": float("nan")},
        {"tokens_per_s": float("inf")},
        {"tokens_per_s": 1e300},
        {"uplink_mbit_s": -1.0},
        {"ready_in_s": "soon"},
        {"step_s": float("nan")},
        {"step_s": -0.1},
        {"step_s": 1e300},
        {"peer_id": "somebody"},
    ],
)
def test_a_field_out_of_range_is_refused(change):
    with pytest.raises(RecordError, match=next(iter(change))):
        signed(record(**change))


def test_extra_and_missing_fields_are_refused():
    for extra in ([], [1], [1, 2]):
        body = msgpack.packb([IDENTITY.peer_id, *extra])
        data = msgpack.packb([VERSION, body, b"", bytes(64)])
        with pytest.raises(RecordError, match="list of 14"):
            open_record(data, run_id=RUN)


@given(st.binary(max_size=400))
def test_hostile_bytes_are_only_record_errors(data):
    with pytest.raises(RecordError):
        open_record(data, run_id=RUN)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_every_flipped_byte_is_found(place, value):
    data = bytearray(signed())
    place %= len(data)
    if data[place] == value:
        return
    data[place] = value
    with pytest.raises(RecordError):
        open_record(bytes(data), run_id=RUN)


def test_an_oversized_record_is_refused_before_it_is_parsed():
    with pytest.raises(RecordError, match="at most"):
        open_record(bytes(1 << 20), run_id=RUN)


@dataclass
class Stored:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def stored(r=None, **changes):
    r = r or record()
    plain = Stored(KEY, msgpack.packb(r.peer_id), msgpack.packb(signed(r)), r.expires_at)
    for name, value in changes.items():
        setattr(plain, name, value)
    return plain


def test_validator_takes_what_belongs_here():
    assert RosterValidator(KEY, RUN).validate(stored())


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"x" * 20},
        {"subkey": msgpack.packb("someone else")},
        {"subkey": b""},
        {"expiration_time": 7e9},
        {"value": b"\xc1"},
        {"value": msgpack.packb({"a": 1})},
        {"value": b"\xdd\xff\xff\xff\xff"},
        {"value": bytes(1 << 20)},
    ],
)
def test_validator_refuses_what_does_not(change):
    assert not RosterValidator(KEY, RUN).validate(stored(**change))


def test_a_record_dated_2200_is_refused():
    assert not RosterValidator(KEY, RUN).validate(stored(record(expires_at=7258118400.0)))


def test_an_expired_record_does_not_spoil_the_others():
    assert RosterValidator(KEY, RUN).validate(stored(record(expires_at=clock.now_s() - 5)))


class FakeDht:
    def __init__(self):
        self.records, self.takes = {}, True

    async def store(self, key, value, expiration_time, subkey=None):
        old = self.records.get(subkey)
        if not self.takes or (old and old.expiration_time >= expiration_time):
            return False
        self.records[subkey] = Stored(KEY, subkey, value, expiration_time)
        return True

    async def get(self, key, latest=False):
        @dataclass
        class Found:
            value: object

        return Found(self.records) if self.records else None


def admit(peer, credential, use=""):
    if credential != b"ticket":
        raise Refused(RefusalCode.NOT_ADMITTED, "no ticket")


def roster(dht, identity=IDENTITY, credential=b"ticket"):
    return DhtRoster(dht, identity, run_id=RUN, credential=lambda: credential, check=admit)


def test_a_later_record_replaces_also_with_a_shorter_ttl():
    async def main():
        ours = roster(FakeDht())
        await ours.publish(record(position=1), 60)
        await ours.publish(record(position=2), 5)
        assert (await ours.peers())[IDENTITY.peer_id].position == 2
        await ours.leave()
        assert await ours.peers() == {}
        await ours.leave()

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_search_that_takes_too_long_runs_to_its_own_end(fails, caplog):
    """Cancelled, it would leave tasks of hivemind's behind that wait for ever."""

    async def main():
        dht, answered, ended = FakeDht(), asyncio.Event(), []

        async def get(key, latest=False):
            await answered.wait()
            ended.append(key)
            if fails:
                raise OSError("no route")

        dht.get = get
        ours = roster(dht)
        with pytest.raises(RosterError, match="TimeoutError"):
            await ours.peers()
        reading = asyncio.create_task(ours.peers())
        await asyncio.sleep(0)
        await end(reading)
        assert not ended
        answered.set()
        await asyncio.sleep(1)
        assert len(ended) == 2
        assert not ours._searches

    run_virtual(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("answers", [True, False])
def test_a_goodbye_that_fails_does_not_blame_the_clock(answers, caplog):
    async def main():
        dht = FakeDht()
        ours = roster(dht)
        await ours.publish(record(), 60)
        dht.takes = False
        if not answers:
            dht.store = None
        await ours.leave()

    with caplog.at_level("INFO"):
        asyncio.run(main())
    (said,) = caplog.messages
    assert said.startswith("our record stays in the roster for another 60 s: ")
    assert ("others may have left before" in said) == answers
    assert "clock" not in said


def test_readers_skip_peers_without_admission_and_garbage():
    async def main():
        dht, stranger = FakeDht(), Identity.ephemeral()
        await roster(dht).publish(record(), 30)
        await roster(dht, stranger, b"forged").publish(record(stranger), 30)
        dht.records["junk"] = Stored(KEY, "junk", {"not": "bytes"}, 1.0)
        assert set(await roster(dht).peers()) == {IDENTITY.peer_id}

    asyncio.run(main())


def test_a_record_that_the_dht_refuses_is_an_error():
    async def main():
        dht = FakeDht()
        dht.takes = False
        with pytest.raises(RosterError, match="clock"):
            await roster(dht).publish(record(), 30)
        with pytest.raises(ValueError, match="ttl"):
            await roster(dht).publish(record(), MAX_TTL_S + 1)
        with pytest.raises(ValueError, match="expected"):
            await roster(dht).publish(record(Identity.ephemeral()), 30)

    asyncio.run(main())


def test_memory_roster_expires_by_the_loop():
    async def main():
        board = MemoryBoard()
        a, b = (Identity.ephemeral() for _ in range(2))
        await board.roster(a.peer_id).publish(record(a), 10)
        await board.roster(b.peer_id).publish(record(b), 100)
        assert len(await board.roster("c").peers()) == 2
        await asyncio.sleep(50)
        assert set(await board.roster("c").peers()) == {b.peer_id}
        await board.roster(b.peer_id).leave()
        assert await board.roster("c").peers() == {}

    run_virtual(main())


def test_a_record_that_the_dht_keeps_for_another_time_is_refused():
    """A peer could otherwise keep its own record, or another's, beyond what was signed."""
    plain = record()
    for expires_at in (plain.expires_at + 1, plain.expires_at - 1):
        kept = replace_expiry(stored(plain), expires_at)
        assert not RosterValidator(KEY, RUN).validate(kept)
    assert RosterValidator(KEY, RUN).validate(replace_expiry(stored(plain), plain.expires_at))


def replace_expiry(kept, expires_at):
    return replace(kept, expiration_time=expires_at)


def test_readers_skip_records_that_have_expired(monkeypatch):
    async def main():
        ours = roster(FakeDht())
        await ours.publish(record(), 30)
        assert set(await ours.peers()) == {IDENTITY.peer_id}
        later_s = clock.now_s() + 31
        monkeypatch.setattr(clock, "now_s", lambda: later_s)
        assert await ours.peers() == {}

    asyncio.run(main())
