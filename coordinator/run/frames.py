"""Compressed bytes from others: what they hold is checked before memory is taken for it."""

from __future__ import annotations

import zstandard


def compress(raw: bytes) -> bytes:
    """Return bytes as one zstd frame, which states their number."""
    return zstandard.ZstdCompressor().compress(raw)


def decompress(frame: bytes, *, most_bytes: int) -> bytes:
    """Return what a frame holds.

    Raises:
        ValueError: it is damaged, or holds more than so many bytes, or doesn't say how many.
    """
    try:
        held = zstandard.get_frame_parameters(frame).content_size
        if held > most_bytes:  # an unknown size is larger than all
            raise ValueError(f"expected a frame of at most {most_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"expected a zstd frame: {error}") from None
