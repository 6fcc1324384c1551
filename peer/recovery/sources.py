"""Sources of missing entries and snapshots: a peer over libp2p, or the coordinator over gRPC.

Nothing that a source gives is trusted: the replica that recovers verifies all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import Busy, CoordinatorError, NotThere
from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import PeerRecord
from atoll.dht.tasks import together
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import LogError, SignedRoot, sha256
from atoll.optim.reduction.cells import UpdateError
from atoll.optim.state.outer_state import StateError
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.rounds.context import Context, fetch_head
from atoll.peer.rounds.fetching import (
    MAX_SPAN,
    Asking,
    fetch_body,
    fetch_headers,
    fetch_leaf_digests,
    fetch_leaves,
)
from atoll.peer.rounds.messages import PROTOCOL, Decided, Head

FETCH_ERRORS = (TransportError, CoordinatorError, LogError, StateError, UpdateError)
"""Errors that a source causes if it fails or lies; another one may do better."""

ASK_AGAIN_S = 0.5  # a donor that is in a round: a question is a round trip, a round up to minutes
PEER_PATIENCE_S = 10.0  # with the rounds of a donor, after which it is asked beside them
COORDINATOR_PATIENCE_S = 60.0  # with its other readers, who have peers to ask as well
ASKED_AT_ONCE = 32  # peers that a recovery asks at once, however many there are


class Source(Protocol):
    """A peer or coordinator that may have the missing entries or snapshot."""

    @property
    def name(self) -> str:
        """Name for log lines."""
        ...

    async def head(self) -> Head:
        """Return its position and what it can serve."""
        ...

    async def headers(self, start: int, stop: int) -> list[Decided]:
        """Fetch entries with certificates from `start` on, perhaps fewer than asked for."""
        ...

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        """Fetch bytes of an entry's body, from `start` on as many as `into` holds.

        Raises:
            GaveWay: the donor gives nothing at the moment, and this `gives_way`.
        """
        ...

    async def leaf_digests(self, position: int, count: int) -> list[bytes]:
        """Fetch the digests of the leaves of a snapshot, which has `count` of them."""
        ...

    def leaves(self, position: int, indices: Sequence[int]) -> AsyncIterator[tuple[int, bytes]]:
        """Fetch consecutive leaves of a snapshot.

        Raises:
            GaveWay: the donor gives nothing at the moment.
        """
        ...


class LastSource(Source, Protocol):
    """The coordinator: it vouches for states that no entry certifies yet."""

    async def signed_root(self, position: int) -> SignedRoot | None:
        """Return the root of its state at a position by the run's key, unverified."""
        ...


@dataclass(frozen=True, kw_only=True)
class Donor:
    """A source, and its answer to `head`."""

    source: Source
    head: Head

    @property
    def name(self) -> str:
        """Name for log lines."""
        return self.source.name


def whom_to_ask(
    records: Mapping[str, PeerRecord], *, me: str, turn: int
) -> Iterator[tuple[str, ...]]:
    """Yield the peers of the roster in the order in which they are asked, some at a time.

    First come those that are furthest by their records, which may be old, and as many drawn by a
    hash: each peer draws others, and at each turn others again.
    """
    drawn = sorted(
        (peer for peer in records if peer != me),
        key=lambda peer: sha256(f"{me}|{turn}|{peer}".encode()),
    )
    furthest = sorted(drawn, key=lambda p: (-records[p].epoch, -records[p].position))
    order = list(dict.fromkeys([*furthest[: ASKED_AT_ONCE // 2], *drawn]))
    for start in range(0, len(order), ASKED_AT_ONCE):
        yield tuple(order[start : start + ASKED_AT_ONCE])


Sources = Callable[[], Awaitable[Iterator[Sequence[Source]]]]
"""Lists the donors that may have the missing data, some at a time."""


class RosterSources:
    """The peers of the run's roster, in another order at each turn."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._turn = 0

    async def __call__(self) -> Iterator[Sequence[Source]]:
        """Read the roster."""
        records = await self._ctx.roster_peers()
        records = {p: r for p, r in records.items() if not self._ctx.conduct.is_out(p)}
        self._turn += 1
        return (
            [PeerSource(self._ctx, peer) for peer in some]
            for some in whom_to_ask(records, me=self._ctx.me.peer_id, turn=self._turn)
        )


class GivingWay:
    """The patience of a reader that gives way to what its donor has to send otherwise.

    Where a link is slow, a round takes most of the time between two, and a reader that had the rest
    alone would fall behind.
    """

    def __init__(self, patience_s: float) -> None:
        """A donor that has given nothing for `patience_s` is asked without giving way."""
        self._patience_s = patience_s
        self._since_s: float | None = None
        """since when it has given nothing"""

    @contextmanager
    def asking(self, donor: str, wanted: bool = True) -> Iterator[bool]:
        """Yield whether a request gives way, if that is `wanted`.

        Raises:
            GaveWay: the donor has refused it therefore.
        """
        now_s, since_s = asyncio.get_running_loop().time(), self._since_s
        gives_way = wanted and (since_s is None or now_s < since_s + self._patience_s)
        try:
            yield gives_way
        except (Refused, Busy) as error:
            is_busy = isinstance(error, Busy) or error.code == RefusalCode.BUSY
            if not gives_way or not is_busy:
                raise
            self._since_s = now_s if since_s is None else since_s
            raise GaveWay(str(error), peer=donor) from None
        self._since_s = None


class PeerSource:
    """A peer of the roster."""

    def __init__(self, ctx: Asking, peer: str) -> None:
        self._ctx = ctx
        self._peer = peer
        self._giving_way = GivingWay(PEER_PATIENCE_S)

    @property
    def name(self) -> str:
        """The PeerID."""
        return self._peer

    async def head(self) -> Head:
        """Return its position and what it can serve."""
        timeout_s = 2 * self._ctx.settings.stall_s
        ctx = self._ctx
        return await fetch_head(
            ctx.transport, ctx.roster, self._peer, epoch=ctx.known_epoch, timeout_s=timeout_s
        )

    async def headers(self, start: int, stop: int) -> list[Decided]:
        """Fetch entries with certificates."""
        return await fetch_headers(self._ctx, self._peer, start, stop)

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        """Fetch bytes of an entry's body."""
        with self._giving_way.asking(self._peer, gives_way) as gives_way:
            await fetch_body(self._ctx, self._peer, position, start, into, gives_way=gives_way)

    async def leaf_digests(self, position: int, count: int) -> list[bytes]:
        """Fetch the digests of a snapshot's leaves."""
        return await fetch_leaf_digests(self._ctx, self._peer, position, count)

    async def leaves(
        self, position: int, indices: Sequence[int]
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Fetch leaves of a snapshot."""
        with self._giving_way.asking(self._peer) as gives_way:
            leaves = fetch_leaves(self._ctx, self._peer, position, indices, gives_way=gives_way)
            async with aclosing(leaves):
                async for index, leaf in leaves:
                    yield index, leaf


class CoordinatorSource:
    """The coordinator, which has all of the log but what it missed, and is in no round."""

    name = "coordinator"

    def __init__(
        self, client: CoordinatorClient, epoch_record: bytes, *, snapshot_every: int
    ) -> None:
        """`epoch_record` is what the coordinator gave when this peer joined or was in touch."""
        self._client = client
        self._giving_way = GivingWay(COORDINATOR_PATIENCE_S)
        self._snapshot_every = snapshot_every
        self.epoch_record = epoch_record
        self.epoch = 0
        self.position = 0
        self.chain = bytes(32)

    async def head(self) -> Head:
        """Return its position and its newest snapshot."""
        info = await self._client.fetch_snapshot()
        newest = info.position
        # An interval later an entry certifies a snapshot's root: the newest may be of no use yet.
        older = [p for n in (2, 1) if (p := newest - n * self._snapshot_every) >= 0]
        has = await together(*(self._has(p) for p in older))
        held = [p for p, is_held in zip(older, has, strict=True) if is_held]
        return Head(
            protocol=PROTOCOL,
            epoch=self.epoch,
            position=self.position,
            chain=self.chain,
            incarnation=None,
            role="follower",
            ready_in_s=0.0,
            first_body=info.first_body,
            snapshots=(*held, newest),
            epoch_record=self.epoch_record,
        )

    async def signed_root(self, position: int) -> SignedRoot | None:
        """Return the root of its snapshot at a position by the run's key; None without one."""
        with suppress(NotThere):
            return (await self._client.fetch_snapshot(position)).signed_root
        return None

    async def _has(self, position: int) -> bool:
        with suppress(CoordinatorError):
            return (await self._client.fetch_snapshot(position)).position == position
        return False

    async def headers(self, start: int, stop: int) -> list[Decided]:
        """Fetch entries with certificates."""
        count = min(stop - start, MAX_SPAN)
        entries = self._client.fetch_entries(start, count)
        return [Decided(entry=e.entry, certificate=e.certificate) async for e in entries]

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        """Fetch bytes of an entry's body."""
        with self._giving_way.asking(self.name, gives_way) as gives_way:
            await self._client.fetch_body(position, start, into, gives_way=gives_way)

    async def leaf_digests(self, position: int, count: int) -> list[bytes]:
        """Fetch the digests of a snapshot's leaves."""
        return list((await self._client.fetch_snapshot(position)).leaf_digests)

    async def leaves(
        self, position: int, indices: Sequence[int]
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Fetch leaves of a snapshot."""
        first, count = indices[0], len(indices)
        with self._giving_way.asking(self.name) as gives_way:
            leaves = self._client.fetch_leaves(position, first, count, gives_way=gives_way)
            async with aclosing(leaves):
                async for index, leaf in leaves:
                    yield index, leaf
