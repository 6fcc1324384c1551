"""Hivemind's DHT, which answers only to peers of the run, and only introduces.

Rounds do not depend on it (`atoll.dht.roster`). It differs from hivemind 1.1.12 as follows:

- Requests and answers carry the sender's admission in the field of an access token. It is checked
  against the PeerID that libp2p authenticated, in a thread, before anything else happens.
- A node's id is the hash of its PeerID, so no node chooses a place next to the roster's key, and a
  PeerID has one place. Other ids enter no routing table and no search.
- Records are stored and read one by one: a bad one is dropped, and the others count. Dictionaries
  are not accepted as a whole, and stores name at most `MAX_ITEMS` records.
- Each PeerID has a budget of `BURST` records, refilled by `PER_S`.
- An answer that is too long ends in an error at the caller; hivemind leaks the task and the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgpack

from atoll.dht import clock
from atoll.dht.bindings import (
    DHTID,
    P2P,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
    ValueWithExpiration,
    dht_pb2,
    p2pd_pb2,
)
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import RosterValidator
from atoll.dht.tasks import together
from atoll.dht.transport import MAX_ADMISSION_BYTES, Check, Refused

logger = logging.getLogger(__name__)

MAX_RECORDS = 2048  # of 1 kB: an answer with all of them fits into hivemind's 4 MiB
MAX_DICTIONARY_BYTES = 3 << 20  # below hivemind's 4 MiB, with room for the frame
MAX_BAD = 32  # records of one answer, after which the rest of it is not read
MAX_ITEMS = 32  # records in one store; handing over to a new node takes several
DICTIONARY_EXT = 0x50  # msgpack's extension type of hivemind's dictionaries
FIND_COST = 32  # an answer is some hundred kB and takes milliseconds to pack
BURST = 4096.0  # two handovers of a full roster
PER_S = 64.0  # 15 ms of verification in a second; honest peers need less than one
CHECKS = 64  # admissions under verification, of all peers together
CHECKS_PER_PEER = 4  # a newcomer pings and searches at once
ADMITTED_S = 600.0  # after which an admission is verified again
MAX_KNOWN = 4096  # peers whose admission or budget is remembered
MAX_HANDLERS = 256  # calls that are answered at once
WAIT_S = 3.0  # hivemind's own wait for a node that does not answer
ERROR_CHARS = 512

T = TypeVar("T")


def node_id_of(peer_id: str) -> DHTID:
    """Return the only node id that a peer may use."""
    return DHTID.generate(source=peer_id)


class Budget:
    """Allowances by PeerID, which refill with time."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left: dict[str, tuple[float, float]] = {}

    def spend(self, peer: str, cost: float) -> bool:
        """Take `cost` from a peer's allowance; False if it has less."""
        now_s = asyncio.get_running_loop().time()
        left, since_s = self._left.pop(peer, (self._burst, now_s))
        left = min(self._burst, left + (now_s - since_s) * self._per_s)
        self._left[peer] = (left - cost if left >= cost else left, now_s)
        if len(self._left) > MAX_KNOWN:
            self._left.pop(next(iter(self._left)))
        return left >= cost


class Door:
    """Admits peers by their admissions, and verifies what strangers send, in a thread."""

    def __init__(self, check: Check, credential: Callable[[], bytes]) -> None:
        """`credential` returns our current admission; `check` judges those of others."""
        self.credential = credential
        self.budget = Budget(BURST, PER_S)
        self._check = check
        self._known: dict[str, tuple[bytes, float]] = {}
        self._checking: dict[str, int] = {}
        # One thread: verification of strangers' bytes may take one core at most.
        self._threads = ThreadPoolExecutor(1, "atoll-dht")

    async def admit(self, peer: str, credential: bytes) -> None:
        """Return if the credential admits the peer. Raises Refused."""
        known = self._known.get(peer)
        if known is not None and known[0] == credential and known[1] > clock.now_s():
            self._check(peer, credential)  # cheap now; it may have been withdrawn since
            return
        if len(credential) > MAX_ADMISSION_BYTES:
            raise Refused(RefusalCode.NOT_ADMITTED, "the admission is too long")
        here = self._checking.get(peer, 0)
        if here >= CHECKS_PER_PEER or sum(self._checking.values()) >= CHECKS:
            raise Refused(RefusalCode.NOT_ADMITTED, "too many admissions wait to be verified")
        self._checking[peer] = here + 1
        try:
            until_s = await self.in_thread(self._check, peer, credential)
        finally:
            self._checking[peer] -= 1
            if not self._checking[peer]:
                del self._checking[peer]
        again_s = clock.now_s() + ADMITTED_S
        self._known[peer] = (credential, min(again_s, again_s if until_s is None else until_s))
        if len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)))

    def charge(self, peer: str, cost: float) -> None:
        """Take from a peer's budget. Raises Refused."""
        if not self.budget.spend(peer, cost):
            raise Refused(RefusalCode.NOT_ADMITTED, "too many calls; wait a minute")

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        """Run `work` in the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GuardedProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """Hivemind's protocol behind a `Door`, which `join` sets before any call."""

    door: Door

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    async def add_p2p_handlers(self, p2p: P2P, wrapper: object = None, **options: Any) -> None:  # noqa: ANN401
        """Serve calls behind the door."""
        await super().add_p2p_handlers(p2p, _Servicer(self), **options)

    def get_stub(self, peer: PeerID) -> Any:  # noqa: ANN401 - hivemind's class, wrapped
        """Return what calls a peer with our admission, and checks the peer's."""
        stub = super(DHTProtocol, self).get_stub(self.p2p, peer)
        return _Stub(stub, self.door, str(peer))

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Take a peer into the table at its own id alone."""
        if node_id is None or node_id == node_id_of(str(peer_id)):
            await super().update_routing_table(node_id, peer_id, responded)
        else:
            logger.debug("%s names a node id that is not its own", peer_id)

    async def call_store(
        self,
        peer: PeerID,
        keys: Sequence[DHTID],
        values: Sequence[Any],
        expiration_time: Any,  # noqa: ANN401
        subkeys: Any = None,  # noqa: ANN401
        in_cache: Any = None,  # noqa: ANN401
    ) -> list[bool] | None:
        """Store records; a dictionary goes record by record, some in a call."""
        if not any(isinstance(value, DictionaryDHTValue) for value in values):
            stored: list[bool] | None = await super().call_store(
                peer, keys, values, expiration_time, subkeys, in_cache
            )
            return stored
        items = [
            (key, subkey, item.value, item.expiration_time)
            for key, value in zip(keys, values, strict=True)
            if isinstance(value, DictionaryDHTValue)
            for subkey, item in value.items()
        ]
        all_stored: list[bool] = []
        for start in range(0, len(items), MAX_ITEMS):
            some = items[start : start + MAX_ITEMS]
            some_keys, some_subkeys, some_values, until = zip(*some, strict=True)
            stored = await super().call_store(
                peer, some_keys, some_values, until, some_subkeys, False
            )
            if stored is None:
                return None
            all_stored += stored
        return all_stored

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[Any, Any] | None:
        """Ask a peer for records and nearer nodes; None if it does not answer properly."""
        keys = list(keys)
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        try:
            async with self.rpc_semaphore:
                answer = await self.get_stub(peer).rpc_find(request, timeout=self.wait_timeout)
            if len(answer.results) != len(keys):
                raise ValueError(f"{len(answer.results)} results, expected {len(keys)}")
            found = {}
            for key, result in zip(keys, answer.results, strict=True):
                value = None
                if result.type == dht_pb2.FOUND_DICTIONARY:
                    value = await self.door.in_thread(self._sound, key, result.value)
                found[key] = value, self._nearest(result)
        except Exception:
            logger.debug("a search at %s failed", peer, exc_info=True)
            known: Any = self.routing_table.get(peer_id=peer)
            await self.update_routing_table(known, peer, responded=False)
            return None
        if answer.peer.node_id:
            await self.update_routing_table(DHTID.from_bytes(answer.peer.node_id), peer)
        return found

    def _nearest(self, result: Any) -> dict[DHTID, PeerID]:  # noqa: ANN401 - protobuf
        named = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
        pairs = [
            (DHTID.from_bytes(node_id), PeerID(peer))
            for (node_id, peer), _ in zip(named, range(self.bucket_size), strict=False)
        ]
        return {node_id: peer for node_id, peer in pairs if node_id == node_id_of(str(peer))}

    def _sound(self, key: DHTID, value: bytes) -> Any:  # noqa: ANN401 - hivemind's named tuple
        """Return the good records of a dictionary that a peer sent, None without any."""
        good, num_bad = DictionaryDHTValue(), 0
        validator: Any = self.record_validator
        for item in _items(value):
            subkey, data, expires_at = _three(item)
            record = DHTRecord(key.to_bytes(), self.serializer.dumps(subkey), data, expires_at)
            if validator.validate(record):
                good.store(subkey, data, expires_at)
                continue
            num_bad += 1
            if num_bad >= MAX_BAD:
                break
        return ValueWithExpiration(good, good.latest_expiration_time) if len(good) else None

    async def take_store(self, request: Any, remote: str) -> Any:  # noqa: ANN401 - protobuf
        """Store the good records among those of a call."""
        names = ("keys", "subkeys", "values", "expiration_time", "in_cache")
        columns = [list(getattr(request, name)) for name in names]
        num_items = len(columns[0])
        if num_items > MAX_ITEMS or any(len(column) != num_items for column in columns):
            raise ValueError(f"expected at most {MAX_ITEMS} records, got {num_items}")
        self.door.charge(remote, 1 + num_items)
        items = list(zip(*columns, strict=True))
        good = await self.door.in_thread(self._judge, items)
        stored = [
            is_good and self._keep(*item[:4]) for is_good, item in zip(good, items, strict=True)
        ]
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    def _judge(self, items: Iterable[Any]) -> list[bool]:
        validator: Any = self.record_validator
        return [
            not in_cache and validator.validate(DHTRecord(key, tag, value, expires_at))
            for key, tag, value, expires_at, in_cache in items
        ]

    def _keep(self, key: bytes, tag: bytes, value: bytes, expires_at: float) -> bool:
        key_id, subkey = DHTID.from_bytes(key), msgpack.unpackb(tag)
        held = self.storage.get(key_id)
        if held is not None and len(held.value) >= MAX_RECORDS and subkey not in held.value:
            return False
        return bool(self.storage.store_subkey(key_id, subkey, value, expires_at))


class _Servicer:
    """The calls of others: answered if they show an admission."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol

    async def rpc_ping(self, request: Any, context: Any) -> Any:  # noqa: ANN401 - protobuf
        """Answer that we are here, and note who asked."""
        await self._enter(request, context, cost=1)
        return self._signed(await DHTProtocol.rpc_ping(self._protocol, request, context))

    async def rpc_store(self, request: Any, context: Any) -> Any:  # noqa: ANN401 - protobuf
        """Store records."""
        remote = await self._enter(request, context, cost=0)
        await self._note(request, context)
        return self._signed(await self._protocol.take_store(request, remote))

    async def rpc_find(self, request: Any, context: Any) -> Any:  # noqa: ANN401 - protobuf
        """Return records and nearer nodes."""
        await self._enter(request, context, cost=FIND_COST)
        if len(request.keys) != 1:  # the same key a thousand times would fill our memory
            raise ValueError(f"expected one key, got {len(request.keys)}")
        return self._signed(await DHTProtocol.rpc_find(self._protocol, request, context))

    async def _enter(self, request: Any, context: Any, *, cost: float) -> str:  # noqa: ANN401
        remote = str(context.remote_id)
        door = self._protocol.door
        await door.admit(remote, request.auth.client_access_token.signature)
        door.charge(remote, cost)
        return remote

    async def _note(self, request: Any, context: Any) -> None:  # noqa: ANN401 - protobuf
        if request.peer.node_id:
            node_id = DHTID.from_bytes(request.peer.node_id)
            await self._protocol.update_routing_table(node_id, context.remote_id)

    def _signed(self, answer: Any) -> Any:  # noqa: ANN401 - protobuf
        answer.auth.service_access_token.signature = self._protocol.door.credential()
        return answer


class _Stub:
    """Calls to one peer, which must answer with its admission."""

    def __init__(self, stub: Any, door: Door, peer: str) -> None:  # noqa: ANN401
        self._stub, self._door, self._peer = stub, door, peer

    async def rpc_ping(self, request: Any, timeout: float | None = None) -> Any:  # noqa: ANN401
        return await self._ask(self._stub.rpc_ping, request, timeout)

    async def rpc_store(self, request: Any, timeout: float | None = None) -> Any:  # noqa: ANN401
        return await self._ask(self._stub.rpc_store, request, timeout)

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:  # noqa: ANN401
        return await self._ask(self._stub.rpc_find, request, timeout)

    async def _ask(self, call: Any, request: Any, timeout_s: float | None) -> Any:  # noqa: ANN401
        request.auth.client_access_token.signature = self._door.credential()
        answer = await call(request, timeout=timeout_s)
        await self._door.admit(self._peer, answer.auth.service_access_token.signature)
        return answer


async def join(
    p2p: P2P,
    *,
    peer_id: str,
    reached: Sequence[str],
    validator: RosterValidator,
    door: Door,
) -> DHTNode:
    """Return a node that has joined the DHT through the PeerIDs `reached`."""
    duck: Any = validator
    node = await DHTNode.create(
        p2p=p2p,
        node_id=node_id_of(peer_id),
        record_validator=duck,
        wait_timeout=WAIT_S,
        client_mode=True,  # its own protocol serves nothing; ours takes its place
        cache_locally=False,  # a cached record would show an old position
        cache_nearest=0,
        cache_on_store=False,
    )
    given = node.protocol
    protocol = GuardedProtocol(_initialized_with_create=True)
    for name, value in {**vars(given), "client_mode": False}.items():
        setattr(protocol, name, value)
    protocol.door = door
    protocol.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    node.protocol = protocol
    _answer_calls(p2p)
    await protocol.add_p2p_handlers(p2p)
    await together(*(protocol.call_ping(PeerID.from_base58(peer)) for peer in reached))
    if reached:
        search = asyncio.create_task(node.find_nearest_nodes([node.node_id]))
        await asyncio.wait({search}, timeout=WAIT_S)  # cancelled, it would leave tasks behind
        search.add_done_callback(_forget)
    return node


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.debug("a search for neighbours failed: %r", task.exception())


def _answer_calls(p2p: P2P) -> None:
    """Replace hivemind's answering of calls, which leaks every answer that is too long."""
    client: Any = p2p._client
    control = client.control

    async def answer(call_id: Any, request: Any) -> None:  # noqa: ANN401
        try:
            if len(control._handler_tasks) > MAX_HANDLERS:
                raise Refused(RefusalCode.NOT_ADMITTED, "too many calls at once")
            handler = control.unary_handlers[request.proto]
            data = await handler(request.data, PeerID(request.peer))
            reply = p2pd_pb2.CallUnaryResponse(response=data)
            if reply.ByteSize() + 64 > control.persistent_conn_max_msg_size:
                raise ValueError("the answer is too long")
        except Exception as error:
            reply = p2pd_pb2.CallUnaryResponse(error=repr(error)[:ERROR_CHARS].encode())
        finally:
            control._handler_tasks.pop(call_id, None)
        await control._pending_messages.put(
            p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=reply)
        )

    control._handle_persistent_request = answer


def _items(value: bytes) -> list[Any]:
    """Return the items of a packed dictionary of hivemind's. Raises ValueError."""
    if len(value) > MAX_DICTIONARY_BYTES:
        raise ValueError(f"a dictionary of {len(value)} bytes")
    packed = msgpack.unpackb(value, max_ext_len=MAX_DICTIONARY_BYTES, max_map_len=0)
    if type(packed) is not msgpack.ExtType or packed.code != DICTIONARY_EXT:
        raise ValueError("expected a dictionary")
    parts = msgpack.unpackb(packed.data, max_ext_len=0, max_map_len=0, max_array_len=MAX_RECORDS)
    if type(parts) is not list or len(parts) != 3 or type(parts[2]) is not list:
        raise ValueError("expected a dictionary of three parts")
    return parts[2]


def _three(item: Any) -> tuple[str, bytes, float]:  # noqa: ANN401
    if type(item) is not list or len(item) != 3:
        raise ValueError("expected a subkey, a value and a time")
    subkey, value, expires_at = item
    if type(subkey) is not str or type(value) is not bytes or type(expires_at) is not float:
        raise ValueError("a subkey, value or time has a wrong type")
    return subkey, value, expires_at
