"""Many short frames at once are those of one at a time."""

import math

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.compression.scratch import TILE
from atoll.compression.topk import largest_of_chunks
from support.specs import SPECS as ALL

SPECS = [
    "topk+2bit",
    "topk(k=64)+int8",
    "topk(k=16)+fp32",
    "topk(k=4096)+2bit",
    "topk(k=5)+2bit",  # its indices do not fill their planes
    "topk+2bit(block=64)",  # several blocks a row
    "topk+int4",
    "int8",
    "sign",
    "2bit",
]


def rows(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [4_096, 65_536, 5_000, 512, 300])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_the_frames_of_each(spec, numel):
    x_RN = rows(5, numel) * torch.tensor([1.0, 1e-6, 30.0, 1e12, 1.0]).unsqueeze(1)
    one_by_one = [parse(spec).encode(x_N) for x_N in x_RN]
    assert parse(spec).encode_rows(x_RN) == one_by_one


@pytest.mark.parametrize("spec", ALL)
def test_every_codec_decodes_rows_as_it_decodes_frames(spec):
    codec, x_RN = parse(spec), rows(3, 8_192)
    frames, out_RN = codec.encode_rows(x_RN), torch.empty(3, 8_192)
    codec.decode_rows(frames, out_RN)
    for frame, out_N in zip(frames, out_RN, strict=True):
        assert torch.equal(codec.decode(frame, 8_192), out_N)


SHAPES = ((70, 70), (96,), (256, 96), (96,), (3,), (0,), (64, 64), (8_192,), (5, 9, 100), (96, 96))


@pytest.mark.parametrize("spec", ALL)
def test_pieces_of_several_shapes_are_the_frames_of_each(spec):
    codec, sizes = parse(spec), [math.prod(dims) for dims in SHAPES]
    x_N = torch.cat([10.0 ** (4 * i - 20) * rows(1, n).view(-1) for i, n in enumerate(sizes)])
    parts = [part.view(dims) for part, dims in zip(x_N.split(sizes), SHAPES, strict=True)]
    frames, out_N = [codec.encode(part) for part in parts], torch.empty_like(x_N)
    if codec.encode(parts[0]) == frames[0]:  # others draw
        assert codec.encode_pieces(x_N, SHAPES) == frames
    codec.decode_pieces(frames, SHAPES, out_N)
    decoded = zip(frames, SHAPES, out_N.split(sizes), strict=True)
    assert all(torch.equal(codec.decode(f, dims).view(-1), out) for f, dims, out in decoded)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("at", [77, 4_900, 4_996 + 24_576])  # in a matrix, in a vector, in both
def test_a_piece_with_nan_or_infinity_is_refused(bad, at):
    x_N = torch.ones(sum(math.prod(dims) for dims in SHAPES))
    x_N[at] = bad
    with pytest.raises(CodecError, match="finite"):
        parse("dct").encode_pieces(x_N, SHAPES)


def test_a_piece_with_a_wrong_checksum_or_falling_indices_is_refused():
    codec, shapes = parse("dct"), ((96, 96), (64, 64), (128, 64))
    x_N = torch.randn(sum(math.prod(dims) for dims in shapes))
    frames, out_N = codec.encode_pieces(x_N, shapes), torch.empty_like(x_N)
    flipped = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    with pytest.raises(CodecError, match="checksum"):
        codec.decode_pieces([frames[0], flipped, frames[2]], shapes, out_N)
    falling = bytearray(frames[2])
    indices = 8 + 2 * 2 + 2 * 32
    falling[indices : indices + 64] = bytes(64)
    falling = codec._header((128, 64), falling, len(falling)) + falling[8:]
    with pytest.raises(CodecError, match="rising"):
        codec.decode_pieces([*frames[:2], falling], shapes, out_N)


def test_rows_without_any_size_are_encoded():
    """Where squares vanish other factors are taken, and of equal values any."""
    codec, x_RN = parse("topk+2bit"), rows(3, 8_192)
    x_RN[1].zero_()
    x_RN[2] *= 1e-30
    out_RN = torch.empty_like(x_RN)
    codec.decode_rows(codec.encode_rows(x_RN), out_RN)
    assert not out_RN[1].any()
    assert int((out_RN[0] != 0).sum()) == int((out_RN[2] != 0).sum()) == 128
    lost, size = (x_RN.double() - out_RN).norm(dim=1), x_RN.double().norm(dim=1)
    torch.testing.assert_close(lost[2] / size[2], lost[0] / size[0], atol=0.1, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", ["topk+2bit", "topk+fp32", "int8"])
def test_a_row_with_nan_or_infinity_is_refused(spec, bad):
    x_RN = rows(3, 4_096)
    x_RN[1, 77] = bad
    with pytest.raises(CodecError, match="finite"):
        parse(spec).encode_rows(x_RN)


def test_frames_of_another_length_codec_or_checksum_are_refused():
    codec, out_RN = parse("topk+2bit"), torch.zeros(2, 4_096)
    first, second = codec.encode_rows(rows(2, 4_096))
    with pytest.raises(CodecError, match="bytes"):
        codec.decode_rows([first, second[:-1]], out_RN)
    with pytest.raises(CodecError, match="parameters"):
        codec.decode_rows([first, parse("topk+2bit(width=1)").encode(out_RN[0])], out_RN)
    with pytest.raises(CodecError, match="checksum"):
        codec.decode_rows([first, second[:-1] + bytes([second[-1] ^ 1])], out_RN)


def test_a_row_whose_indices_do_not_rise_is_refused():
    codec, out_RN = parse("topk+fp32"), torch.empty(2, 4_096)
    first, second = (bytearray(frame) for frame in codec.encode_rows(rows(2, 4_096)))
    indices = 8 + 4 * 64
    second[indices : indices + 64] = bytes(64)
    head = codec._header((4_096,), second, len(second))
    with pytest.raises(CodecError, match="rising"):
        codec.decode_rows([first, head + second[8:]], out_RN)


@pytest.mark.parametrize("k", [1, 32, 64, 1_000, 4_096])
def test_what_is_above_the_threshold_is_what_topk_takes(k):
    x_CM = rows(6, 4_096)
    expected = x_CM.abs().topk(k, dim=1).indices.sort(1).values
    assert torch.equal(largest_of_chunks(x_CM, k), expected)


def test_of_equal_magnitudes_exactly_k_are_taken():
    x_CM = rows(5, 4_096)
    x_CM[0].fill_(2.0)
    x_CM[4] = x_CM[3].sign() * (x_CM[3].abs() > 2)  # few levels, as a mean of codes has
    x_CM[1, 100:].zero_()
    x_CM[2, ::2] = -x_CM[2, 1::2]
    found_CK = largest_of_chunks(x_CM, 63)
    assert bool((found_CK[:, 1:] > found_CK[:, :-1]).all())
    taken = x_CM.gather(1, found_CK).abs().sort(1).values
    assert torch.equal(taken, x_CM.abs().topk(63, dim=1).values.flip(1))
    assert found_CK[0].tolist() == list(range(63))
    assert torch.equal(found_CK[4], x_CM[4].nonzero().view(-1)[:63])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_of_whole_tiles_with_nan_or_infinity_are_refused(bad):
    """They are encoded at once, unlike shorter ones."""
    x_RN = rows(3, TILE)
    x_RN[1, 77] = bad
    with pytest.raises(CodecError, match="finite"):
        parse("int8").encode_rows(x_RN)


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_int8_rows_in_steps_are_the_frames_of_all_and_what_they_decode_to(at_once):
    codec, x_RN = parse("int8"), rows(5, TILE) * torch.logspace(-30, 30, 5).unsqueeze(1)
    loaded, decoded = list[int](), list[torch.Tensor]()

    def load(step, x):
        loaded.append(x.numel() // TILE)
        x.copy_(x_RN[step * at_once :][:at_once].reshape(-1))

    def done(step, x, sent):
        assert torch.equal(x, x_RN[step * at_once :][:at_once].reshape(-1))
        decoded.append(sent.clone())
        x.zero_()
        sent.zero_()

    frames_RB = torch.empty((5, codec.wire_bytes(TILE)), dtype=torch.uint8)
    codec.encode_in_steps(frames_RB, at_once, load, done)
    frames = [row.tobytes() for row in frames_RB.numpy()]
    assert frames == codec.encode_rows(x_RN)
    assert loaded == {1: [1] * 5, 3: [3, 2], 16: [5]}[at_once]
    out_RN = torch.empty(5, TILE)
    codec.decode_rows(frames, out_RN)
    assert torch.equal(torch.cat(decoded), out_RN.view(-1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_in_steps_that_is_not_finite_is_refused_before_any_is_done(value):
    def load(step, x):
        x.fill_(value if step == 2 else 1.0)

    def done(step, x, sent):
        pytest.fail("expected no step to be done")

    codec = parse("int8")
    frames_RB = torch.empty((3, codec.wire_bytes(TILE)), dtype=torch.uint8)
    with pytest.raises(CodecError, match="NaN or infinity"):
        codec.encode_in_steps(frames_RB, 1, load, done)


def test_rows_are_encoded_and_decoded_at_once_as_one_after_the_other():
    x_RN = rows(3, TILE)
    for spec in ("int8", "sign", "int4"):
        codec, sent_RN, out_RN = parse(spec), torch.empty(3, TILE), torch.empty(3, TILE)
        frames = codec.encode_and_decode_rows(x_RN, sent_RN)
        assert frames == codec.encode_rows(x_RN)
        codec.decode_rows(frames, out_RN)
        assert torch.equal(sent_RN, out_RN)
