"""The bodies of missed entries, fetched ahead of their turn and from several donors at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from atoll.dht.tasks import end, together
from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import Entry, split_parts
from atoll.optim.log.live_replica import Compute
from atoll.optim.state import vectors
from atoll.peer.recovery.errors import GaveWay
from atoll.peer.recovery.paces import Paces
from atoll.peer.recovery.sources import ASK_AGAIN_S, FETCH_ERRORS, Donor

BODIES_AHEAD_BYTES = 64 << 20  # on their way or waiting; of larger bodies one at a time comes
STREAMS = 6  # at once: what a link of 100 Mbit/s at 100 ms takes
BODIES_AHEAD = STREAMS  # small ones come on a stream each
# As so many pieces under way counts a round. With more, all would go to one that is in none, which
# may be slow, and hold them long after the rounds have ended.
IN_ROUND_PIECES = 2
PIECE_BYTES = 4 << 20  # of parts that are asked for together; a larger part comes alone

OnFailure = Callable[[Entry, Donor, Exception], None]


@dataclass(frozen=True, kw_only=True)
class Body:
    """A body, each part of which has the digest that its entry names."""

    data: memoryview
    givers: frozenset[str]
    """names of the donors that gave some of it"""


@dataclass(frozen=True, kw_only=True)
class BodyPiece:
    """Consecutive parts of a body, which one donor is asked for."""

    parts: range
    """indices"""
    start: int
    """first byte in the body"""
    stop: int


class Bodies:
    """Fetches the bodies of entries, some ahead of their turn, from donors in turn.

    One stream of libp2p is slow on a long line: a young one takes 256 KiB a round trip, 5 MB/s at
    50 ms. Several at once, from several peers, fill the link, so a large body comes in pieces;
    entries are applied one at a time. A body is cut between its parts, as each of them has a
    digest: who gave a wrong one is known.
    """

    def __init__(
        self,
        *,
        compute: Compute,
        on_failure: OnFailure,
        paces: Paces,
        stream: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Use as a context, for one try: what is still under way at its end is given up.

        Args:
            compute: hashes what came.
            on_failure: called with a donor that did not give what an entry names.
            paces: of donors, as far as they were asked before.
            stream: waits until the own link has time for one piece more.
        """
        self._entries: list[Entry] = []
        self._turns: dict[int, int] = {}
        self._taken = 0
        """entries whose bodies were asked for"""
        self._donors: dict[str, Donor] = {}
        self._compute = compute
        self._on_failure = on_failure
        self._paces = paces
        self._stream = stream
        paces.forgive()
        self._giving_way = set[int]()
        """positions before which the rounds of donors come"""
        self._lacking = set[int]()
        """positions of bodies that are not here yet"""
        self._have_come = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[Body]] = {}
        self._streams = asyncio.Semaphore(STREAMS)
        self._asked = Counter[str]()
        """pieces under way, by donor"""
        self._in_round_until: dict[str, float] = {}
        """by donor that a request gave way to: when it is asked again"""

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
        await end(*self._tasks.values())

    def add(
        self, entries: Sequence[Entry], donors: Sequence[Donor], *, gives_way: bool = False
    ) -> None:
        """Take entries after those before, and begin to fetch their bodies as far as there is room.

        Args:
            entries: in the order in which `of` is asked for them.
            donors: those that may have them, beside the ones before.
            gives_way: whether the rounds of donors come first.
        """
        positions = [entry.position for entry in entries]
        self._turns |= {each: len(self._entries) + n for n, each in enumerate(positions)}
        self._entries += entries
        self._donors |= {donor.name: donor for donor in donors}
        if gives_way:
            self._giving_way.update(positions)
        self._lacking.update(positions)
        self._tell_if_all_came()
        self._fetch_from(self._taken)

    async def have_come(self) -> None:
        """Wait until all bodies are here, so that the links of donors and this one are idle."""
        await self._have_come.wait()

    async def of(self, entry: Entry) -> Body:
        """Return the body of an entry.

        Raises:
            PeerUnreachable: no donor has all of it.
        """
        early = self._tasks.get(entry.position)
        if early is not None and early.done() and early.exception() is not None:
            del self._tasks[entry.position]  # nobody had it then
        self._taken = self._turns[entry.position]
        self._fetch_from(self._taken)
        body = await self._tasks.pop(entry.position)
        self._taken += 1
        self._fetch_from(self._taken)  # while the caller applies this one
        return body

    def after(self, entry: Entry) -> int:
        """Return how many entries come after one."""
        return len(self._entries) - 1 - self._turns[entry.position]

    def _fetch_from(self, turn: int) -> None:
        """Begin to fetch a body and those after it, as far as there is room."""
        room = BODIES_AHEAD_BYTES
        for ahead, entry in enumerate(self._entries[turn : turn + BODIES_AHEAD]):
            room -= entry.body_bytes
            if room < 0 and ahead > 0:
                return
            if entry.position not in self._tasks:
                # `of` awaits it, or the end of the context cancels it.
                self._tasks[entry.position] = asyncio.create_task(self._fetch(entry))

    async def _fetch(self, entry: Entry) -> Body:
        data, failed = vectors.buffer(entry.body_bytes), set[str]()
        givers = await together(
            *(
                self._fetch_piece(entry, piece, data[piece.start : piece.stop], failed)
                for piece in pieces(entry)
            )
        )
        self._lacking.discard(entry.position)
        self._tell_if_all_came()
        return Body(data=data, givers=frozenset(givers))

    def _tell_if_all_came(self) -> None:
        if self._lacking:
            self._have_come.clear()
        else:
            self._have_come.set()

    async def _fetch_piece(
        self, entry: Entry, piece: BodyPiece, into: memoryview, failed: set[str]
    ) -> str:
        """Ask one donor after the other until one gives the piece; return its name.

        Args:
            entry: the one whose body it is of.
            piece: what is fetched.
            into: the place for it.
            failed: takes the donors that failed, which are asked for nothing more of this entry.
        """
        async with self._streams, self._stream():
            while (donor := self._next(entry, piece, failed)) is not None:
                self._asked[donor.name] += 1
                try:
                    if await self._gives(entry, piece, into, donor, failed):
                        return donor.name
                finally:
                    self._asked[donor.name] -= 1
        raise PeerUnreachable(f"no peer has the body of entry {entry.position}")

    async def _gives(
        self, entry: Entry, piece: BodyPiece, into: memoryview, donor: Donor, failed: set[str]
    ) -> bool:
        """Return whether a donor gives a piece, and note what that tells of it."""
        await asyncio.sleep(self._rest_s(donor))
        gives_way, began_s = entry.position in self._giving_way, _now_s()
        try:
            await donor.source.body(entry.position, piece.start, into, gives_way=gives_way)
            took_s = _now_s() - began_s
            await self._compute(split_parts, entry, piece.parts, into)
        except GaveWay:
            self._in_round_until[donor.name] = _now_s() + ASK_AGAIN_S
            return False
        except FETCH_ERRORS as error:
            if donor.name not in failed:  # once for an entry, however many of its pieces
                failed.add(donor.name)
                self._paces.failed(donor.name, len(into), _now_s() - began_s)
                self._on_failure(entry, donor, error)
            return False
        self._paces.gave(donor.name, len(into), took_s)
        return True

    def _rest_s(self, donor: Donor) -> float:
        """Return how long a donor is left to its round; others are asked first."""
        return max(0.0, self._in_round_until.get(donor.name, 0.0) - _now_s())

    def _next(self, entry: Entry, piece: BodyPiece, failed: set[str]) -> Donor | None:
        """Return the donor that should be done first, but for those that failed."""
        left = [d for d in holders(entry, piece, [*self._donors.values()]) if d.name not in failed]
        byte_s = self._paces.of([donor.name for donor in left])
        # Nobody knows how long a round takes, so who is in one counts as no faster than the others.
        idle_s = [byte_s[donor.name] for donor in left if self._rest_s(donor) == 0]
        for donor in left:
            if self._rest_s(donor) > 0:
                byte_s[donor.name] = max(byte_s[donor.name], min(idle_s, default=0.0))
        return min(left, key=lambda donor: self._load(donor) * byte_s[donor.name], default=None)

    def _load(self, donor: Donor) -> float:
        """Return the pieces that it gives until one more is done; each failure counts as one."""
        in_round = IN_ROUND_PIECES if self._rest_s(donor) > 0 else 0
        return self._asked[donor.name] + self._paces.failures(donor.name) + in_round + 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def pieces(entry: Entry) -> Iterator[BodyPiece]:
    """Cut a body between its parts."""
    first = start = stop = 0
    for index, part in enumerate(entry.parts):
        if stop > start and stop + part.wire_bytes - start > PIECE_BYTES:
            yield BodyPiece(parts=range(first, index), start=start, stop=stop)
            first, start = index, stop
        stop += part.wire_bytes
    if stop > start:
        yield BodyPiece(parts=range(first, len(entry.parts)), start=start, stop=stop)


def holders(entry: Entry, piece: BodyPiece, donors: Sequence[Donor]) -> list[Donor]:
    """Return the donors with an entry's body, in another order for each piece.

    So all of those give a share that would be done at once.
    """
    start = (entry.position + piece.parts.start) % len(donors) if donors else 0
    turn = [*donors[start:], *donors[:start]]
    return [d for d in turn if d.head.first_body <= entry.position < d.head.position]
