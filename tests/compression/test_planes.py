"""Values of four bytes, packed for the way."""

import numpy as np
import pytest
import zstandard

from atoll.compression.base import CodecError
from atoll.compression.planes import pack, unpack

RNG = np.random.default_rng(1)
TRAINED = RNG.normal(0, 0.02, 50_000).astype("<f4").tobytes()


@pytest.mark.parametrize("more", range(4))
def test_what_was_packed_comes_back(more: int) -> None:
    data = TRAINED + b"\x07" * more
    assert unpack(pack(data), len(data)) == data


def test_trained_values_take_a_seventh_less() -> None:
    assert len(pack(TRAINED)) < 0.87 * len(TRAINED)


@pytest.mark.parametrize("data", [b"", b"abc", RNG.bytes(4096)], ids=["nothing", "few", "noise"])
def test_what_gets_no_shorter_travels_as_it_is(data: bytes) -> None:
    assert pack(data) is data
    assert unpack(data, len(data)) == data


@pytest.mark.parametrize(
    "packed",
    [
        pack(TRAINED + b"more"),
        pack(TRAINED[:-4]),
        pack(TRAINED)[:-3],
        b"other bytes",
        zstandard.ZstdCompressor(write_content_size=False).compress(TRAINED),
    ],
    ids=["longer", "shorter", "cut off", "no frame", "of unknown length"],
)
def test_bytes_that_hold_another_number_are_refused(packed: bytes) -> None:
    with pytest.raises(CodecError, match="zstd frame"):
        unpack(packed, len(TRAINED))
