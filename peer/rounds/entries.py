"""Entries of others, opened off the event loop.

An entry of a large run has a megabyte, and deflate shrinks one that lies to a thirtieth. So a peer
reads the head first (`messages.entry_head`), asks whether it wants this entry from this sender, and
only then inflates and parses the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.optim.log.entry import Entry, Member, NamedEntry
from atoll.optim.log.live_replica import Compute
from atoll.peer.rounds.messages import inflated, is_longer

LOOP_BYTES = 64 * 1024  # some 350 members, which take 2 ms to parse: a thread costs as much
LOOP_MEMBERS = 350


async def named(compute: Compute, data: bytes) -> tuple[bytes, NamedEntry]:
    """Inflate an entry, and name it by its head and its digest; nothing else of it is parsed.

    Raises:
        MalformedRecord: it is too long, or does not begin like an entry.
    """
    if is_longer(data, LOOP_BYTES):
        found: tuple[bytes, NamedEntry] = await compute(_named, data)
        return found
    return _named(data)


async def completed(compute: Compute, data: bytes, members: Sequence[Member]) -> bytes:
    """Inflate an entry that came without its members, and put them in.

    Raises:
        MalformedRecord: it is too long, or no such entry.
    """

    def work() -> bytes:
        return Entry.with_members(inflated(data, Entry.max_bytes), members)

    if len(members) > LOOP_MEMBERS or is_longer(data, LOOP_BYTES):
        record: bytes = await compute(work)
        return record
    return work()


async def parsed(compute: Compute, record: bytes) -> Entry:
    """Parse an entry.

    Raises:
        MalformedRecord: it is none.
    """
    if len(record) > LOOP_BYTES:
        entry: Entry = await compute(Entry.decode, record)
        return entry
    return Entry.decode(record)


def _named(data: bytes) -> tuple[bytes, NamedEntry]:
    record = inflated(data, Entry.max_bytes)
    return record, NamedEntry.of(record)
