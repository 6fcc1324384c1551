"""Records of a log as objects: entries in groups, epochs, and states.

    rounds      zstd of the msgpack of [[epoch, position, entry, certificate, body_bytes, chain,
                summary], ...]; the summary is what people see of the round (JSON, may be empty)
    epochs      zstd of the msgpack of [[epoch, record], ...]
    snapshot    u32 length of a header, the header (msgpack of position, chain, root, layout, leaf
                digests), then the leaves

All of it is under digests of its own: entries under their chain, epochs under the run's signature,
states under their leaves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from atoll.coordinator.copies.target import CopyDamaged
from atoll.coordinator.run.frames import compress, decompress
from atoll.optim.log.stored_snapshots import SnapshotFile, SnapshotInfo
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import DIGEST_BYTES

GROUP = 128  # entries in an object; the last group is written again until it is full
MAX_GROUP_BYTES = GROUP * (17 << 20)  # entries are at most 16 MiB
MAX_HEADER_BYTES = 256 << 20  # a digest a MiB of state, and a layout
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class CopiedRound:
    """One entry of a log, with what people see of it."""

    epoch: int
    position: int
    entry: bytes
    certificate: bytes
    body_bytes: int
    chain: bytes
    summary: bytes


@dataclass(frozen=True)
class SnapshotHeader:
    """The head of a snapshot's object; the leaves follow it."""

    position: int
    chain: bytes
    root: bytes
    layout: str
    leaf_digests: bytes

    @property
    def digests(self) -> list[bytes]:
        """Return the digest of each leaf."""
        return [
            self.leaf_digests[start : start + DIGEST_BYTES]
            for start in range(0, len(self.leaf_digests), DIGEST_BYTES)
        ]


def pack_rounds(rounds: Sequence[CopiedRound]) -> bytes:
    """Return the object of some entries."""
    return _packed([astuple(each) for each in rounds])


def unpack_rounds(data: bytes, name: str) -> list[CopiedRound]:
    """Return the entries in an object. Raises CopyDamaged."""
    try:
        rounds = [CopiedRound(*row) for row in _unpacked(data, name)]
    except TypeError:
        raise _malformed(name) from None
    kinds = (int, int, bytes, bytes, int, bytes, bytes)
    if any(tuple(map(type, astuple(each))) != kinds for each in rounds):
        raise _malformed(name)
    return rounds


def pack_epochs(epochs: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the object of epoch records."""
    return _packed([list(each) for each in epochs])


def unpack_epochs(data: bytes, name: str) -> list[tuple[int, bytes]]:
    """Return the epoch records in an object. Raises CopyDamaged."""
    rows = _unpacked(data, name)
    if not all(isinstance(row, list) and [*map(type, row)] == [int, bytes] for row in rows):
        raise _malformed(name)
    return [(row[0], row[1]) for row in rows]


def snapshot_chunks(info: SnapshotInfo, file: SnapshotFile) -> Iterator[bytes]:
    """Yield the object of a stored snapshot; each leaf is verified as it is read.

    Raises:
        StoreCorrupt: the disk has spoiled it.
    """
    header = SnapshotHeader(
        info.position, info.chain, info.root, info.layout.to_json(), b"".join(info.leaf_digests)
    )
    raw = packed(astuple(header))
    yield _LENGTH.pack(len(raw)) + raw
    for index in range(file.num_leaves):
        yield file.read_leaf(index)


def read_snapshot(
    chunks: Iterator[bytes], name: str
) -> tuple[SnapshotHeader, int, Iterator[bytes]]:
    """Return the header of a snapshot's object, where its leaves begin, and their bytes.

    Raises:
        CopyDamaged: it is none.
    """
    held = bytearray()

    def take(length: int) -> bytes:
        while len(held) < length and (chunk := next(chunks, b"")):
            held.extend(chunk)
        taken = bytes(held[:length])
        del held[:length]
        return taken

    first = take(_LENGTH.size)
    length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else MAX_HEADER_BYTES + 1
    if length > MAX_HEADER_BYTES:
        raise _malformed(name)
    try:
        header = SnapshotHeader(*msgpack.unpackb(take(length)))
        Layout.from_json(header.layout)
    except (ValueError, TypeError, msgpack.UnpackException):
        raise _malformed(name) from None

    def rest() -> Iterator[bytes]:
        if held:
            yield bytes(held)
        yield from chunks

    return header, _LENGTH.size + length, rest()


def in_pieces(chunks: Iterator[bytes], length: int) -> Iterator[bytes]:
    """Yield the same bytes in pieces of one length, but for the last."""
    held = bytearray()
    for chunk in chunks:
        held.extend(chunk)
        while len(held) >= length:
            yield bytes(held[:length])
            del held[:length]
    if held:
        yield bytes(held)


def _packed(rows: Sequence[Sequence[Any]]) -> bytes:
    return compress(packed(rows))


def packed(value: object) -> bytes:
    """Return a value as msgpack."""
    raw = msgpack.packb(value)
    return raw if raw is not None else b""


def _unpacked(data: bytes, name: str) -> list[Any]:
    try:
        rows = msgpack.unpackb(decompress(data, most_bytes=MAX_GROUP_BYTES))
    except (ValueError, msgpack.UnpackException):
        raise _malformed(name) from None
    if not isinstance(rows, list):
        raise _malformed(name)
    return rows


def _malformed(name: str) -> CopyDamaged:
    return CopyDamaged(f"{name}: not what this version of Atoll writes; restore an older copy")
