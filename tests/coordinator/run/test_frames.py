"""Compressed bytes from others."""

import pytest
import zstandard

from atoll.coordinator.run.frames import compress, decompress

RAW = b"a status " * 1000


def test_what_was_compressed_comes_back() -> None:
    assert decompress(compress(RAW), most_bytes=len(RAW)) == RAW
    assert len(compress(RAW)) < len(RAW) / 10


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"no frame",
        compress(RAW)[:-3],
        compress(RAW + b"!"),
        zstandard.ZstdCompressor(write_content_size=False).compress(RAW),
    ],
    ids=["nothing", "other bytes", "cut off", "too large", "of unknown size"],
)
def test_damaged_and_oversized_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        decompress(frame, most_bytes=len(RAW))
