"""The roster of a run: one signed record per peer, from the DHT and from every peer that is asked.

A signed record is the msgpack list

    [3, body, credential, signature]

of a version, `PeerRecord`'s fields as a msgpack list in their order (the last two, the module and
the place in it, only if there is a module), the peer's admission, and an Ed25519 signature by the
PeerID named in the body over

    "atoll roster 1" | 0x00 | SHA-256(run id) | SHA-256(body) | SHA-256(credential)

A record has at most 1 kB. A DHT node stores or believes it only if `RosterValidator` does: the key
is the run's, the subkey is the PeerID that signed, every field has its type and range, nothing is
left over, it expires within `MAX_TTL_S` at the very time given to the DHT (a far date would block
later records), and the admission is the PeerID's and lasts as long. `atoll.dht.kademlia` stores and
reads records one by one, so that one whose admission has ended does not spoil the others.

The DHT introduces peers, but the roster does not depend on it. Peers exchange records in calls
`roster`, in `head` calls, and through the coordinator. A question is the msgpack list
`[digest, record]` of what the caller knows and the caller's own record, which may be empty; an
answer is a list of at most `MAX_SHARED` records, and empty if both know the same::

    digest = SHA-256(the sorted SHA-256 of all known records)

Errors::

    RosterError                the DHT does not answer, or did not accept our record
    RecordError(ValueError)    the bytes are not a valid record
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar, get_args

import msgpack

from atoll.dht import clock
from atoll.dht.addresses import relay_of
from atoll.dht.identity import SIGNATURE_BYTES, Identity, public_key_of, verify
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import MAX_ADMISSION_BYTES, Check, Refused, admit_everyone

logger = logging.getLogger(__name__)

VERSION = 3  # since 3, a record says at what rate its peer relays
DOMAIN = b"atoll roster 1\0"  # a signature for one purpose is worth nothing for another
MAX_TTL_S = 300.0  # the DHT keeps the record that expires last: a far date would block later ones
GOODBYE_S = 5.0  # life of the last record, unless the one before lasts longer
CLOCK_SLACK_S = 10.0  # by which the clock of a record's writer may be ahead of ours
# Limits of a record: a stranger's bytes are refused before they cost much.
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 256  # one of IPv6 by a relay, with two PeerIDs, takes 180
MAX_ARRAY = 32  # more than the fields or addresses of a record
MAX_RECORD_BYTES = 1024  # about 700 are used; two thousand records fit into one DHT answer
MAX_JUDGED = 4096  # records in memory that were found valid: each comes from several nodes
INCARNATION_CHARS = 32
MAX_MODULE_CHARS = 32
MAX_SHARED = 32  # records in one answer: 32 kB at most, a tenth of a second of a slow uplink
MAX_KNOWN = 4096  # records that are kept; the run that was planned for has 1,000 peers
# Seconds of a record's life that count when there is no room for all: honest peers renew theirs
# every 5 s for 20 s, and records of 300 s must not push these out.
RANKED_S = 20.0
# Questions of one peer that are answered: a leader of several terms asks each second in each.
ASKS_S = 4.0
MAX_ASKS = 16.0
EAGER_S = 1.0  # wait for the DHT if others are known without it; its search continues
MAX_INTEGER = 1 << 53  # from here on a double skips integers
MAX_NUMBER = 1e15  # far beyond any rate or time; sums of such numbers stay finite
DHT_TIMEOUT_S = 10.0  # three of hivemind's own waits for a node that does not answer

AMOUNTS = (
    "tokens_per_s",
    "uplink_mbit_s",
    "downlink_mbit_s",
    "ready_in_s",
    "step_s",
    "relay_mbit_s",
    "expires_at",
)

T = TypeVar("T")
RosterRole = Literal["trainer", "follower", "keeper", "left"]
Duty = Literal["serving", "moving", "leaving"]


class RosterError(Exception):
    """The DHT does not answer, or did not accept our record."""


class RecordError(ValueError):
    """The bytes are not a valid record."""


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """A peer's announcement of its place in a pipeline, by which it is decided who moves."""

    duty: Duty = "serving"
    """"moving": on its way to the record's module."""
    tokens_per_s: float = 0.0
    """What it can do in its stage if there is always work; 0 before it was measured."""
    download_mbit_s: float = 0.0
    """Measured; 0 if unknown."""
    device_bytes: int = 0
    """Memory in which it holds a stage."""
    came_from: str = ""
    """The module that it has left lately, or leaves."""
    is_rested: bool = True
    """Whether its last move is long past."""


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """A peer's signed statement about itself."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddrs at which it can be dialed."""
    incarnation: str
    """32 hex digits, new at each start: a restarted peer is a new elector."""
    role: RosterRole
    """"left" is the last record of a peer that says goodbye; readers skip it."""
    epoch: int
    position: int
    """Log position that it has applied."""
    tokens_per_s: float
    uplink_mbit_s: float
    downlink_mbit_s: float
    """Measured; 0 if unknown."""
    ready_in_s: float
    """Seconds until its window ends."""
    step_s: float = 0.0
    """Seconds of an inner step in its last windows, without waits; 0 if unknown."""
    relay_mbit_s: float = 0.0
    """Bandwidth at which it relays for peers that cannot dial each other; 0: it does not."""
    protocol: int
    """Version of the round protocol."""
    expires_at: float = 0.0
    """Seconds since 1970 by the run's clock; `publish` sets it."""
    module: str = ""
    """The module of the run whose log it follows; empty in a dense run."""
    place: StagePlace | None = None
    """In a pipeline, its place in that module."""

    @property
    def is_dialed(self) -> bool:
        """Return whether everybody can dial it: it names no relay."""
        return not any(map(relay_of, self.addresses))


NUM_FIELDS = len(fields(PeerRecord))
MODULE_FIELDS = 2  # the last ones, which a record of a dense run leaves out


class Roster(Protocol):
    """One peer's view of the peers in the run."""

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Replace our record for the next `ttl_s` seconds. Raises RosterError."""
        ...

    async def peers(self) -> dict[str, PeerRecord]:
        """Return the live, admitted peers by PeerID, us included. Raises RosterError."""
        ...

    async def leave(self) -> None:
        """Remove our record at once. Never raises."""
        ...

    def question(self) -> bytes:
        """Return what to send to a peer that is asked for records."""
        ...

    async def answer(self, question: bytes, remote: str = "") -> bytes:
        """Return records for the peer that asks. Raises RecordError."""
        ...

    async def hear(self, answer: bytes) -> None:
        """Take the records of an answer. Raises RecordError."""
        ...


def sign_record(record: PeerRecord, identity: Identity, *, run_id: str, credential: bytes) -> bytes:
    """Return the signed record; it can also travel outside the DHT, from peer to peer.

    It names as many of the addresses, from the first on, as fit into `MAX_RECORD_BYTES`.

    Raises:
        RecordError: a field is out of range, or the record is too long even with one address.
    """
    while True:
        values = list(astuple(_checked(record)))
        body = _pack(values if record.module else values[:-MODULE_FIELDS])
        signature = identity.sign(_signed_bytes(run_id, body, credential))
        data = _pack([VERSION, body, credential, signature])
        if len(data) <= MAX_RECORD_BYTES:
            return data
        if len(record.addresses) <= 1:
            raise RecordError(
                f"record of {len(data)} bytes, expected at most {MAX_RECORD_BYTES}; "
                "announce a shorter address"
            )
        record = replace(record, addresses=record.addresses[:-1])


def open_record(data: bytes, *, run_id: str, check: Check = admit_everyone) -> PeerRecord:
    """Verify and decode a signed record; `expires_at` is not checked.

    Raises:
        RecordError: it is malformed, signed by someone else, or not admitted by `check`.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"record of {len(data)} bytes, expected at most {MAX_RECORD_BYTES}")
    version, body, credential, signature = _list(data, (4,), "signed record")
    if version != VERSION or not all(type(x) is bytes for x in (body, credential, signature)):
        raise RecordError(f"signed record of version {version!r}, expected {VERSION} and bytes")
    if len(credential) > MAX_ADMISSION_BYTES or len(signature) != SIGNATURE_BYTES:
        raise RecordError("signed record with a credential or signature of a wrong length")
    record = _decode_body(body)
    try:
        # First, because it is cheap for members, and the signature means nothing without it.
        until_s = check(record.peer_id, credential, f"record:{record.role}")
    except Refused as error:
        raise RecordError(f"record of {record.peer_id}: {error}") from error
    if until_s is not None and until_s < record.expires_at:
        raise RecordError(f"record of {record.peer_id} lasts longer than its admission")
    if not verify(record.peer_id, _signed_bytes(run_id, body, credential), signature):
        raise RecordError(f"record of {record.peer_id} is not signed by it for this run")
    return record


def _signed_bytes(run_id: str, body: bytes, credential: bytes) -> bytes:
    return DOMAIN + b"".join(
        hashlib.sha256(x).digest() for x in (run_id.encode(), body, credential)
    )


def _pack(value: object) -> bytes:
    data: bytes | None = msgpack.packb(value)
    assert data is not None  # only a packer that was given a stream returns none
    return data


def _list(data: bytes, lengths: tuple[int, ...], what: str) -> list[Any]:
    try:
        value = msgpack.unpackb(data, max_map_len=0, max_ext_len=0, max_array_len=MAX_ARRAY)
    except Exception as error:  # msgpack raises many kinds, all about these bytes
        raise RecordError(f"{what} is not msgpack: {type(error).__name__}") from error
    if type(value) is not list or len(value) not in lengths:
        raise RecordError(f"{what}: expected a list of {' or '.join(map(str, lengths))}")
    return value


def _decode_body(body: bytes) -> PeerRecord:
    given = _list(body, (NUM_FIELDS - MODULE_FIELDS, NUM_FIELDS), "body")
    values = dict(zip((f.name for f in fields(PeerRecord)), given, strict=False))
    if "module" in values and not values["module"]:
        raise RecordError("body: expected no module, or its name")
    if values.get("place") is not None:
        values["place"] = _decode_place(values["place"])
    if type(values["addresses"]) is not list:
        raise RecordError("addresses: expected a list")
    values["addresses"] = tuple(values["addresses"])
    return _checked(PeerRecord(**values))


def _decode_place(given: object) -> StagePlace:
    names = [field.name for field in fields(StagePlace)]
    if type(given) is not list or len(given) != len(names):
        raise RecordError(f"place: expected a list of {len(names)}")
    return StagePlace(**dict(zip(names, given, strict=True)))


def _expect_place(place: StagePlace) -> None:
    _expect(place.duty in get_args(Duty), "duty")
    for name in ("tokens_per_s", "download_mbit_s"):
        value = getattr(place, name)
        _expect(type(value) in (float, int) and math.isfinite(value), name)
        _expect(0 <= value < MAX_NUMBER, name)
    _expect(type(place.device_bytes) is int and 0 <= place.device_bytes < MAX_INTEGER, "device")
    _expect(_is_module(place.came_from), "came_from")
    _expect(type(place.is_rested) is bool, "is_rested")


def _is_module(name: object) -> bool:
    return type(name) is str and len(name) <= MAX_MODULE_CHARS


def _checked(record: PeerRecord) -> PeerRecord:
    """Return the record if every field has its type and range. Raises RecordError."""
    _expect(type(record.peer_id) is str and public_key_of(record.peer_id) is not None, "peer_id")
    _expect(len(record.addresses) <= MAX_ADDRESSES, "addresses")
    for address in record.addresses:
        _expect(_is_address(address), "addresses")
    _expect(_is_hex(record.incarnation, INCARNATION_CHARS), "incarnation")
    _expect(record.role in get_args(RosterRole), "role")
    _expect(_is_module(record.module), "module")
    if record.place is not None:
        _expect_place(record.place)
    for name in ("epoch", "position", "protocol"):
        value = getattr(record, name)
        # `type`, not isinstance: a bool is an int.
        _expect(type(value) is int and 0 <= value < MAX_INTEGER, name)
    for name in AMOUNTS:
        value = getattr(record, name)
        _expect(type(value) in (float, int) and math.isfinite(value), name)
        _expect(0 <= value < MAX_NUMBER, name)
    return record


def _expect(holds: bool, field: str) -> None:
    if not holds:
        raise RecordError(f"{field} has a wrong type or is out of range")


def _is_address(address: object) -> bool:
    return (
        type(address) is str
        and 1 < len(address) <= MAX_ADDRESS_CHARS
        and address.startswith("/")
        and address.isascii()
        and address.isprintable()
    )


def _is_hex(text: object, length: int) -> bool:
    return type(text) is str and len(text) == length and set(text) <= set("0123456789abcdef")


def roster_key(run_id: str) -> str:
    """Return the DHT key of a run's records."""
    return f"atoll/{run_id}/roster"


class RosterValidator:
    """A validator for hivemind's DHT (duck-typed) that passes only valid records of this run.

    `key_id` is the DHT's hash of `roster_key(run_id)`; `check` judges admissions. Any thread may
    call it.
    """

    priority = 0

    def __init__(self, key_id: bytes, run_id: str, check: Check = admit_everyone) -> None:
        self._key_id = key_id
        self._run_id = run_id
        self._check = check
        self._valid: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def validate(self, record: Any) -> bool:  # noqa: ANN401 - hivemind's DHTRecord
        """Return True if a node may store or believe the record."""
        fields = (record.key, record.subkey, record.value, record.expiration_time)
        known = hashlib.sha256(repr(fields).encode()).digest() if len(record.value) < 4096 else b""
        if known in self._valid:
            return True
        try:
            self._validate(*fields)
        except (RecordError, ValueError) as error:
            logger.debug("a DHT record is refused: %s", error)
            return False
        with self._lock:
            self._valid[known] = None
            if len(self._valid) > MAX_JUDGED:
                self._valid.pop(next(iter(self._valid)))
        return True

    def _validate(self, key: bytes, subkey: bytes, value: bytes, expires_at: float) -> None:
        if key != self._key_id:
            raise RecordError("its key is not this run's roster")
        record = open_record(_bytes(value), run_id=self._run_id, check=self._check)
        if subkey != _pack(record.peer_id):
            raise RecordError(f"its subkey is not {record.peer_id}, who signed it")
        # The signature covers the time in the record, not the one given to the DHT.
        if expires_at != record.expires_at:
            raise RecordError("its expiry differs from the DHT's")
        if expires_at > clock.now_s() + MAX_TTL_S + CLOCK_SLACK_S:
            raise RecordError(
                f"it expires in more than {MAX_TTL_S:g} s; the peer's clock may be wrong"
            )

    def sign_value(self, record: Any) -> bytes:  # noqa: ANN401
        """Return the value, which is signed already."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:  # noqa: ANN401
        """Return the value unchanged."""
        return bytes(record.value)

    def merge_with(self, other: object) -> bool:
        """Return False: validators are never merged."""
        return False


def _bytes(value: bytes) -> bytes:
    """Return the bytes inside a DHT value, which hivemind packs with msgpack."""
    if len(value) > MAX_RECORD_BYTES + 8:
        raise RecordError(f"value of {len(value)} bytes, expected at most {MAX_RECORD_BYTES}")
    try:
        data = msgpack.unpackb(value, max_map_len=0, max_ext_len=0, max_array_len=0)
    except Exception as error:
        raise RecordError(f"value is not msgpack: {type(error).__name__}") from error
    if type(data) is not bytes:
        raise RecordError("value: expected bytes")
    return data


InThread = Callable[..., Awaitable[Any]]


class DhtNode(Protocol):
    """The part of hivemind's DHTNode that is used here."""

    async def store(
        self, key: str, value: bytes, expiration_time: float, subkey: str | None = None
    ) -> bool:
        """Return True if a node stored the record."""
        ...

    async def get(self, key: str, latest: bool = False) -> Any:  # noqa: ANN401
        """Return a value with its expiration, or None."""
        ...


@dataclass(frozen=True)
class _Held:
    """A verified record as it came."""

    data: bytes
    digest: bytes
    record: PeerRecord
    rank_s: float = 0.0
    """when it counts as expired if there is no room; on the run's clock"""

    @property
    def is_live(self) -> bool:
        return self.record.expires_at > clock.now_s()


class _Asks:
    """The questions that one peer may still ask."""

    def __init__(self) -> None:
        self._left, self.at_s = MAX_ASKS, time.monotonic()

    def take(self) -> bool:
        """Return whether a question is within the budget, and count it."""
        now_s = time.monotonic()
        self._left = min(MAX_ASKS, self._left + ASKS_S * (now_s - self.at_s))
        self.at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class DhtRoster:
    """All valid records that came from anywhere. `node` is replaced when p2pd was restarted."""

    def __init__(
        self,
        node: DhtNode,
        identity: Identity,
        *,
        run_id: str,
        credential: Callable[[], bytes],
        check: Check,
        in_thread: InThread | None = None,
    ) -> None:
        """`credential` returns our current admission; `check` judges those of others.

        `in_thread` runs verification outside of the loop.
        """
        self.node = node
        self._identity = identity
        self._run_id = run_id
        self._credential = credential
        self._check = check
        self._in_thread = in_thread
        self._last: PeerRecord | None = None
        self._known: dict[str, _Held] = {}
        self._asks: dict[str, _Asks] = {}
        """by peer"""
        self._searches: set[asyncio.Task[Any]] = set()
        self._searching = 0

    # Records from anywhere

    async def take(self, records: Sequence[bytes], *, only: str = "") -> int:
        """Keep the valid records among those that anyone sent; return how many were news.

        With `only`, none but this peer's is kept.
        """
        known = {held.data for held in self._known.values()}
        new = [data for data in records if data not in known]
        if not new:
            return 0
        opened = await self._in_thread(self._open, new) if self._in_thread else self._open(new)
        return sum(self._keep(held) for held in opened if only in ("", held.record.peer_id))

    def _open(self, records: Sequence[bytes]) -> list[_Held]:
        opened = []
        for data in records:
            try:
                record = open_record(data, run_id=self._run_id, check=self._check)
            except RecordError as error:
                logger.debug("a record is skipped: %s", error)
            else:
                opened.append(_Held(data, hashlib.sha256(data).digest(), record))
        return opened

    def _keep(self, held: _Held) -> bool:
        """Keep a record if it is the newest of its peer and not dated too far ahead."""
        peer, until_s = held.record.peer_id, held.record.expires_at
        before = self._known.get(peer)
        if before is not None and before.record.expires_at >= until_s:
            return False
        now_s = clock.now_s()
        if not 0 < until_s - now_s <= MAX_TTL_S + CLOCK_SLACK_S:
            return False
        self._known[peer] = replace(held, rank_s=min(until_s, now_s + RANKED_S))
        if len(self._known) > MAX_KNOWN:
            others = self._known.keys() - {self._identity.peer_id}
            del self._known[min(others, key=lambda p: self._known[p].rank_s)]
        return True

    def _live(self) -> dict[str, _Held]:
        self._known = {peer: held for peer, held in self._known.items() if held.is_live}
        return self._known

    @property
    def known(self) -> list[str]:
        """The PeerIDs of which there are live records, ours included."""
        return list(self._live())

    def question(self) -> bytes:
        """Return what to send to a peer that is asked for records."""
        mine = self._live().get(self._identity.peer_id)
        return _pack([self._digest(), mine.data if mine else b""])

    def _may_ask(self, remote: str) -> bool:
        if remote not in self._asks and len(self._asks) >= MAX_KNOWN:
            full_s = time.monotonic() - MAX_ASKS / ASKS_S
            self._asks = {peer: asks for peer, asks in self._asks.items() if asks.at_s > full_s}
        return self._asks.setdefault(remote, _Asks()).take()

    def _digest(self) -> bytes:
        return hashlib.sha256(b"".join(sorted(h.digest for h in self._known.values()))).digest()

    async def answer(self, question: bytes, remote: str = "") -> bytes:
        """Return records for the peer that asks: ours, and some of the others'.

        Args:
            question: as `question` makes it.
            remote: PeerID of the peer that asks, if it was authenticated. Then only its own record
                is taken, and above `ASKS_S` questions a second the answer is empty.

        Raises:
            RecordError: the question is malformed.
        """
        if remote and not self._may_ask(remote):
            return _pack([])
        if len(question) > MAX_RECORD_BYTES + 64:
            raise RecordError(f"a question of {len(question)} bytes")
        digest, theirs = _list(question, (2,), "question")
        if type(digest) is not bytes or type(theirs) is not bytes:
            raise RecordError("question: expected bytes")
        live = self._live()
        is_same = digest == self._digest()
        if theirs:
            await self.take([theirs], only=remote)
        if is_same:
            return _pack([])
        mine = live.get(self._identity.peer_id)
        others = [held.data for held in live.values() if held is not mine and held.data != theirs]
        # By chance, so that askers hear of all after a while.
        drawn = random.sample(others, min(len(others), MAX_SHARED - (mine is not None)))
        return _pack([*([mine.data] if mine else []), *drawn])

    async def hear(self, answer: bytes) -> None:
        """Take the records of an answer. Raises RecordError if it is malformed."""
        if len(answer) > MAX_SHARED * (MAX_RECORD_BYTES + 8):
            raise RecordError(f"an answer of {len(answer)} bytes")
        try:
            records = msgpack.unpackb(
                answer, max_map_len=0, max_ext_len=0, max_array_len=MAX_SHARED
            )
        except Exception as error:
            raise RecordError(f"answer is not msgpack: {type(error).__name__}") from error
        if type(records) is not list or not all(type(data) is bytes for data in records):
            raise RecordError("answer: expected a list of records")
        await self.take(records)

    async def serve(self, remote: str, question: bytes) -> bytes:
        """Answer the call `roster`."""
        try:
            return await self.answer(question, remote)
        except RecordError as error:
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error

    # Ours

    async def publish(self, record: PeerRecord, ttl_s: float) -> None:
        """Replace our record, even by one with a shorter ttl. Raises RosterError."""
        if record.peer_id != self._identity.peer_id:
            raise ValueError(f"record of {record.peer_id}, expected {self._identity.peer_id}")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl of {ttl_s:g} s, expected at most {MAX_TTL_S:g}")
        if not await self._store(record, ttl_s):
            raise RosterError("no DHT node accepted our record; check this machine's clock")

    async def _store(self, record: PeerRecord, ttl_s: float) -> bool:
        """Return True if a node stored the record. Raises RosterError if the DHT is silent."""
        # The DHT keeps the record that expires last, so a new one must outlive the one before.
        after_last = self._last.expires_at + 1e-3 if self._last else 0.0
        record = replace(record, expires_at=max(clock.now_s() + ttl_s, after_last))
        self._last = record
        value = sign_record(
            record, self._identity, run_id=self._run_id, credential=self._credential()
        )
        # Those that ask us hear of it even if the DHT does not take it.
        held = _Held(value, hashlib.sha256(value).digest(), record)
        self._known[record.peer_id] = held
        key = roster_key(self._run_id)
        store = self.node.store(key, value, record.expires_at, subkey=record.peer_id)
        return await self._from_dht(store, DHT_TIMEOUT_S)

    async def peers(self) -> dict[str, PeerRecord]:
        """Return the live, admitted peers by PeerID.

        Raises:
            RosterError: the DHT does not answer, and no other peer is known.
        """
        is_alone = not set(self._live()) - {self._identity.peer_id}
        if is_alone:
            await self._from_dht(self._search(), DHT_TIMEOUT_S)
        elif not self._searching:
            try:
                await self._from_dht(self._search(), EAGER_S)
            except RosterError as error:
                logger.info("the roster comes from other peers only: %s", error)
        return {
            peer: held.record for peer, held in self._live().items() if held.record.role != "left"
        }

    async def _search(self) -> None:
        """Take the records that the DHT has."""
        self._searching += 1
        try:
            found = await self.node.get(roster_key(self._run_id), latest=True)
        finally:
            self._searching -= 1
        if found is not None and isinstance(found.value, dict):
            values = [item.value for item in found.value.values()]
            await self.take([value for value in values if isinstance(value, bytes)])

    def stay(self) -> None:
        """Let our record stand when this node leaves: the peer is back with another one soon."""
        self._last = None

    async def leave(self) -> None:
        """Replace our record by a short-lived goodbye. Never raises."""
        if self._last is None:
            return
        left_s = self._last.expires_at - clock.now_s()
        why = "no node of the DHT accepted it; the others may have left before"
        try:
            taken = await self._store(replace(self._last, role="left"), GOODBYE_S)
        except Exception as error:
            taken, why = False, str(error)
        if not taken:
            logger.info("our record stays in the roster for another %.0f s: %s", left_s, why)
        self._last = None

    async def _from_dht(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return the DHT's answer if it comes in time; a longer search runs on to its own end.

        Cancelling it would leave tasks behind that wait for it without end (hivemind 1.1.12).
        """
        search = asyncio.create_task(work)  # no `Tasks`: its `close` would cancel it
        self._searches.add(search)
        search.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(search)
        except Exception as error:  # hivemind's errors are of many kinds
            raise RosterError(f"the DHT does not answer: {error!r}") from error

    def _ended(self, search: asyncio.Task[Any]) -> None:
        self._searches.discard(search)
        if not search.cancelled():
            search.exception()  # its caller may have stopped waiting; asyncio would log it as lost
