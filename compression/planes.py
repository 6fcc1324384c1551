"""Values of four bytes, packed without loss for the way: byte by byte, then zstd.

The bytes of fp32 that hold sign and exponent repeat, and those of the fraction are noise. Apart,
the first pack to two fifths and the others pass as they are: 16% less of a trained model's
parameters and momentum (docs/benchmarks/recovery.md). ZipNN (arXiv 2411.05239) does the same with a
Huffman code alone; zstd at its lowest level has one, and leaves noise as it is.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from atoll.compression.zstandard_frames import inflate

Bytes = NDArray[np.uint8]

WIDTH = 4  # bytes of a value; of bf16 two values, whose bytes part as well
LEVEL = 1  # higher ones are slower, and find no more: docs/benchmarks/recovery.md


def pack(data: bytes) -> bytes:
    """Return bytes packed; as they are if that makes them no shorter."""
    planes = np.empty(len(data), np.uint8)
    values, rest = _parted(np.frombuffer(data, np.uint8))
    turned, end = _parted(planes)
    turned.reshape(WIDTH, -1)[:] = values.reshape(-1, WIDTH).T
    end[:] = rest
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)
    return packed if len(packed) < len(data) else data


def unpack(packed: bytes | bytearray | memoryview, num_bytes: int) -> memoryview:
    """Return the bytes that `pack` was given, whose number is known.

    Raises:
        CodecError: the packed bytes are no frame of so many.
    """
    view = memoryview(packed).cast("B")
    if len(view) == num_bytes:
        return view
    planes = inflate(view, num_bytes)
    data = np.empty(num_bytes, np.uint8)
    turned, end = _parted(np.frombuffer(planes, np.uint8))
    values, rest = _parted(data)
    values.reshape(-1, WIDTH)[:] = turned.reshape(WIDTH, -1).T
    rest[:] = end
    return data.data


def _parted(data: Bytes) -> tuple[Bytes, Bytes]:
    """Return whole values, and the bytes after the last of them."""
    whole = len(data) // WIDTH * WIDTH
    return data[:whole], data[whole:]
