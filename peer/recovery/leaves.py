"""The leaves of a snapshot whose root is proved, fetched from all who have it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from atoll.coordinator.run.notice import Report
from atoll.dht.tasks import together
from atoll.optim.log.live_replica import LiveReplica
from atoll.optim.state.outer_state import (
    LEAF_BYTES,
    Assembly,
    OuterState,
    StateError,
    snapshot_bytes,
)
from atoll.peer import notices
from atoll.peer.recovery.errors import GaveWay, NoDonor
from atoll.peer.recovery.sources import ASK_AGAIN_S, FETCH_ERRORS, Source

LEAVES_A_REQUEST = 4  # 4 MiB: 0.3 s at 100 Mbit/s, so a lost donor costs little
REQUESTS_A_DONOR = 2  # at once: a young stream is slow on a long line, and one is always young


class Leaves:
    """Fetches snapshots for a replica; each leaf is verified as it comes."""

    def __init__(
        self,
        replica: LiveReplica,
        *,
        on_event: Report,
        on_progress: Callable[[str, int], None],
    ) -> None:
        """Fetch nothing yet; see `Recovery` for the callbacks."""
        self._replica = replica
        self._on_event = on_event
        self._on_progress = on_progress

    async def fetch(
        self,
        position: int,
        root: bytes,
        holders: Sequence[Source],
        used: set[str],
        *,
        beside: Sequence[Source] = (),
    ) -> OuterState:
        """Return the state at a position.

        Args:
            position: of the snapshot.
            root: what its leaves have to make up.
            holders: those that say they have it.
            used: takes the names of those that gave some of it.
            beside: others that give leaves; the holders say what these have to be.

        Raises:
            NoDonor: they did not give all of it.
        """
        assembly = await self._assembly(position, root, holders)
        transfer = _Transfer(position=position, assembly=assembly, used=used)
        asked = [source for source in (*holders, *beside) for _ in range(REQUESTS_A_DONOR)]
        await together(*(self._drain(source, transfer) for source in asked))
        if assembly.missing:
            raise NoDonor(f"{len(assembly.missing)} leaves of snapshot {position} are missing")
        try:
            return assembly.finish()
        except StateError as error:
            raise NoDonor(f"snapshot {position}: {error}") from error

    async def _assembly(self, position: int, root: bytes, holders: Sequence[Source]) -> Assembly:
        replay = self._replica.replay
        length = snapshot_bytes(replay.layout, replay.memory_numel, replay.memory_dtype)
        count = -(-length // LEAF_BYTES)
        for source in holders:
            with suppress(*FETCH_ERRORS):
                digests = await source.leaf_digests(position, count)
                return Assembly(
                    layout=replay.layout,
                    position=position,
                    leaf_digests=digests,
                    root=root,
                    memory_numel=replay.memory_numel,
                    memory_dtype=replay.memory_dtype,
                    allocate=self._replica.allocate,
                )
        raise NoDonor(f"no peer has the digests of snapshot {position}")

    async def _drain(self, source: Source, transfer: _Transfer) -> None:
        """Take ranges of leaves from one donor until all have come or the donor fails.

        A range that another donor has taken may be given back: that one fails or is in a round.
        """
        assembly = transfer.assembly
        while assembly.missing and source.name not in transfer.failed:
            if not transfer.queue:
                await transfer.rest()
                continue
            indices = transfer.queue.pop()
            try:
                await self._take(source, indices, transfer)
            except GaveWay:
                transfer.give_back(indices)
                await transfer.rest()
            except FETCH_ERRORS as error:
                transfer.give_back(indices)
                transfer.failed.add(source.name)
                failed = notices.snapshot_failed(
                    snapshot=transfer.position, donor=source.name, reason=str(error)
                )
                self._on_event("warning", failed)
            finally:
                if not assembly.missing:
                    transfer.is_done.set()

    async def _take(self, source: Source, indices: list[int], transfer: _Transfer) -> None:
        assembly = transfer.assembly
        async for index, leaf in source.leaves(transfer.position, indices):
            await self._replica.compute(assembly.add, index, leaf)
            transfer.used.add(source.name)
            self._on_progress("snapshot", len(assembly.missing))
        if lacking := assembly.missing.intersection(indices):
            raise StateError(f"expected {len(indices)} leaves, {len(lacking)} of them did not come")


class _Transfer:
    """A snapshot on its way."""

    def __init__(self, *, position: int, assembly: Assembly, used: set[str]) -> None:
        self.position = position
        self.assembly = assembly
        self.used = used
        """names of donors that gave some of it"""
        self.failed = set[str]()
        """names of donors that failed"""
        self.queue = _ranges(sorted(assembly.missing))
        """what no donor is asked for"""
        self.is_done = asyncio.Event()

    def give_back(self, indices: Sequence[int]) -> None:
        """Leave to the next donor what did not come."""
        self.queue += _ranges([i for i in indices if i in self.assembly.missing])

    async def rest(self) -> None:
        """Wait until a donor may be asked again, or until all is done."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_S):
                await self.is_done.wait()


def _ranges(indices: Sequence[int]) -> list[list[int]]:
    """Return runs of consecutive leaves; the last comes first off the list."""
    step = LEAVES_A_REQUEST
    return [list(indices[i : i + step]) for i in range(0, len(indices), step)][::-1]
