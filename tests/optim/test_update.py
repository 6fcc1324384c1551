import pytest
import torch
from torch import Tensor

from atoll.compression import parse
from atoll.optim.layout import CELL
from atoll.optim.update import (
    UpdateError,
    cells_bytes,
    decode_cells,
    decode_update,
    encode_cells,
)

N = 2 * CELL + 700
CODEC = parse("int8")


@pytest.fixture(scope="module")
def frames() -> list[bytes]:
    return encode_cells(CODEC, vector())


def vector() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(3))


def test_length_follows_from_layout_and_codec(frames):
    assert [len(frame) for frame in frames] == [
        CODEC.wire_bytes(CELL),
        CODEC.wire_bytes(CELL),
        CODEC.wire_bytes(700),
    ]
    assert cells_bytes(CODEC, N) == sum(map(len, frames))
    assert cells_bytes(CODEC, CELL) == CODEC.wire_bytes(CELL)


def test_body_in_one_piece_or_in_parts_decodes_alike(frames):
    whole = decode_update([b"".join(frames)], CODEC, N)
    parts = decode_update([frames[0], b"", bytearray(frames[1] + frames[2])], CODEC, N)
    assert torch.equal(whole, parts)
    assert torch.equal(whole, decode_cells(CODEC, frames, N))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, vector(), atol=0.03, rtol=0)


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_body_that_is_too_short_is_refused(frames, cut):
    body = b"".join(frames)[:cut]
    with pytest.raises(UpdateError, match=f"got {cut}"):
        decode_update([body], CODEC, N)


def test_body_that_is_too_long_is_refused(frames):
    with pytest.raises(UpdateError, match="expected a body of"):
        decode_update([*frames, b"x"], CODEC, N)


def test_length_is_checked_before_memory_is_taken():
    with pytest.raises(UpdateError, match="expected a body of"):
        decode_update([b"1234"], CODEC, 1 << 50)


def test_cell_in_two_parts_is_refused(frames):
    body = b"".join(frames)
    with pytest.raises(UpdateError, match="whole cells"):
        decode_update([body[:10], body[10:]], CODEC, N)


def test_flipped_bit_names_its_cell(frames):
    broken = bytearray(frames[1])
    broken[len(broken) // 2] ^= 1
    with pytest.raises(UpdateError, match="cell 1: "):
        decode_update([frames[0], broken, frames[2]], CODEC, N)


def test_frames_in_another_order_of_lengths_are_refused(frames):
    with pytest.raises(UpdateError):
        decode_update([frames[2], frames[1], frames[0]], CODEC, N)


def test_number_of_cells_that_the_layout_denies_is_refused(frames):
    with pytest.raises(UpdateError, match="expected 3 cells, got 2"):
        decode_cells(CODEC, frames[:2], N)


def test_codec_that_decodes_to_infinity_is_refused(frames):
    class Lying(type(CODEC)):
        def decode(self, data, shape, *, device="cpu", out=None):
            return out.fill_(float("inf"))

    with pytest.raises(UpdateError, match="finite"):
        decode_update(frames, Lying(), N)


@pytest.mark.parametrize("name", ["stateful", "exact_size"])
def test_codec_that_can_not_make_updates_is_refused(frames, name):
    codec = type("Other", (type(CODEC),), {name: not getattr(CODEC, name)})()
    with pytest.raises(UpdateError, match="int8"):
        decode_update(frames, codec, N)
    with pytest.raises(UpdateError, match="int8"):
        cells_bytes(codec, N)
