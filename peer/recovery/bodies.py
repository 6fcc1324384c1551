"""The bodies of missed entries, fetched ahead of their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from atoll.dht.tasks import end
from atoll.optim.log.entry import Entry
from atoll.peer.recovery.sources import FETCH_ERRORS, Donor

BODIES_AHEAD_BYTES = 64 << 20  # under way or waiting for its turn; a larger body comes alone
BODIES_AHEAD = 6  # streams: what a link of 100 Mbit/s at 100 ms takes

OnFailure = Callable[[Entry, Donor, Exception], None]


class Bodies:
    """Fetches the bodies of consecutive entries, some ahead of their turn, from donors in turn.

    One stream of libp2p is slow on a long line: a young one takes 256 KiB a round trip, 5 MB/s at
    50 ms. Several at once, from several peers, fill the link; entries are applied one at a time.
    Nothing is verified here.
    """

    def __init__(
        self, entries: Sequence[Entry], donors: Sequence[Donor], on_failure: OnFailure
    ) -> None:
        """Use as a context: what is still under way at its end is given up.

        Args:
            entries: consecutive ones, in the order in which `of` is asked for them.
            donors: those that may have them.
            on_failure: called with a donor that did not give one.
        """
        self._entries = entries
        self._donors = donors
        self._on_failure = on_failure
        self._tasks: dict[int, asyncio.Task[bytes | bytearray]] = {}

    async def __aenter__(self) -> Self:
        """Begin without fetching anything."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what is under way."""
        await end(*self._tasks.values(), expected=FETCH_ERRORS)

    def begin(self) -> None:
        """Begin to fetch the first bodies before anybody asks for one."""
        if self._entries:
            self._fetch_from(self._entries[0].position)

    async def of(self, entry: Entry) -> AsyncIterator[tuple[Donor, bytes | bytearray]]:
        """Yield the body as one donor after the other gives it, until the caller is content."""
        self._fetch_from(entry.position)
        for donor in holders(entry, self._donors):
            task = self._tasks.pop(entry.position, None) or _fetching(donor, entry)
            try:
                body = await task
            except FETCH_ERRORS as error:
                self._on_failure(entry, donor, error)
                continue
            yield donor, body

    def _fetch_from(self, position: int) -> None:
        """Begin to fetch a body and those after it, as far as there is room."""
        room, first = BODIES_AHEAD_BYTES, position - self._entries[0].position
        for entry in self._entries[first : first + BODIES_AHEAD]:
            room -= entry.body_bytes
            if room < 0 and entry.position > position:
                return
            donors = holders(entry, self._donors)
            if donors and entry.position not in self._tasks:
                self._tasks[entry.position] = _fetching(donors[0], entry)


def holders(entry: Entry, donors: Sequence[Donor]) -> list[Donor]:
    """Return the donors beyond an entry, in another order for each, so that all give a share."""
    start = entry.position % len(donors)
    turn = [*donors[start:], *donors[:start]]
    return [donor for donor in turn if donor.head.position > entry.position]


def _fetching(donor: Donor, entry: Entry) -> asyncio.Task[bytes | bytearray]:
    async def fetch() -> bytes | bytearray:
        if not entry.body_bytes:
            return b""
        return await donor.source.body(entry.position, entry.body_bytes)

    return asyncio.create_task(fetch())  # `of` awaits it, or the end of the context cancels it
