"""The tokenizer's file on its way to a peer."""

from __future__ import annotations

import hashlib
import random
import zlib

import pytest

from atoll.coordinator.run.tokenizer_file import (
    MAX_PACKED_BYTES,
    TokenizerFileError,
    pack,
    unpack,
)

RAW = b'{"model": {}}' * 50
SHA256 = hashlib.sha256(RAW).hexdigest()


def test_a_file_comes_back() -> None:
    packed = pack(RAW)
    assert packed is not None and len(packed) < len(RAW)
    assert unpack(packed, sha256=SHA256, size=len(RAW)) == RAW


@pytest.mark.parametrize("raw", [b"", random.Random(1).randbytes(MAX_PACKED_BYTES)])
def test_a_file_that_cannot_travel_is_not_packed(raw: bytes) -> None:
    assert pack(raw) is None


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"not zlib",
        zlib.compress(RAW)[:-30],
        zlib.compress(RAW + b" "),
        zlib.compress(RAW[:-1] + b"!"),
    ],
)
def test_another_file_is_refused(packed: bytes) -> None:
    with pytest.raises(TokenizerFileError):
        unpack(packed, sha256=SHA256, size=len(RAW))


def test_a_bomb_is_unpacked_to_the_stated_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    class Watched:
        def __init__(self) -> None:
            self._inner = zlib_decompressobj()

        def decompress(self, data: bytes, limit: int) -> bytes:
            unpacked.append(self._inner.decompress(data, limit))
            return unpacked[-1]

    zlib_decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Watched)
    with pytest.raises(TokenizerFileError):
        unpack(zlib.compress(bytes(64 << 20)), sha256=SHA256, size=1000)
    assert [len(each) for each in unpacked] == [1001]
