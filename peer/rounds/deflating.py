"""Records that name every member travel deflated: names of fields and PeerIDs shrink to half."""

from __future__ import annotations

import zlib

from atoll.optim.log.entry import MalformedRecord

LEVEL = 1  # of zlib: higher ones take longer and shrink these no further


def deflated(record: bytes) -> bytes:
    """A record's bytes as they travel."""
    return zlib.compress(record, LEVEL)


def inflated(data: bytes, max_bytes: int) -> bytes:
    """The bytes that travelled.

    Raises:
        MalformedRecord: they are not deflated, or are more than `max_bytes`, which is noticed
            before they take memory.
    """
    reader = zlib.decompressobj()
    try:
        record = reader.decompress(data, max_bytes)
    except zlib.error as error:
        raise MalformedRecord(f"not deflated: {error}") from None
    if not reader.eof or reader.unused_data:
        raise MalformedRecord(f"deflated: expected at most {max_bytes} bytes and no more")
    return record
