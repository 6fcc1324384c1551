"""What rows of a sparse codec say is what they decode to."""

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.compression.topk import largest_of_chunks

SPECS = [
    "topk+2bit",
    "topk(k=16)+fp32",
    "topk(k=5)+2bit",  # its indices do not fill their planes
    "topk+2bit(block=64)",
    "randk(seed=3)",
]


def rows(count: int, numel: int) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("numel", [65_536, 5_000, 4_000, 512, 300, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_say_what_they_decode_to(spec, numel):
    x_RN, dense_RN = rows(3, numel), torch.empty(3, numel)
    frames, sent = parse(spec).encode_sparse_rows(x_RN)
    parse(spec).decode_rows(frames, dense_RN)
    assert torch.equal(sent.dense(), dense_RN)
    assert bool((sent.indices[1:] > sent.indices[:-1]).all())
    assert frames == parse(spec).encode_rows(x_RN)
    for frame, dense_N in zip(frames, dense_RN, strict=True):
        assert torch.equal(parse(spec).decode(frame, numel), dense_N)
    read = parse(spec).sparse_rows(frames, numel)
    assert read.shape == sent.shape == (3, numel)
    assert torch.equal(read.indices, sent.indices)
    assert torch.equal(read.values, sent.values)


@pytest.mark.parametrize("numel", [65_536, 512])
def test_a_row_with_a_wrong_checksum_is_refused(numel):
    frames, _ = parse("topk+2bit").encode_sparse_rows(rows(2, numel))
    flipped = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    with pytest.raises(CodecError, match="checksum"):
        parse("topk+2bit").sparse_rows([frames[0], flipped], numel)


def test_an_index_beyond_a_short_row_is_refused():
    codec = parse("topk+fp32")
    frame = bytearray(codec.encode(rows(1, 512)[0]))
    frame[-8:] = b"\xff" * 8  # the high bits of the indices
    sealed = codec._header((512,), frame, len(frame)) + frame[8:]
    with pytest.raises(CodecError, match="below 512"):
        codec.sparse_rows([sealed], 512)


@pytest.mark.parametrize("k", [1, 64, 200, 1_500, 4_096])
@pytest.mark.parametrize("kind", ["few values", "mostly zeros", "none", "noise", "NaN", "infinity"])
def test_of_equal_magnitudes_the_first_are_chosen(kind, k):
    noise_CM = rows(20, 4_096)
    x_CM = {
        "few values": (2 * noise_CM).round(),
        "mostly zeros": noise_CM * (noise_CM > 2.5),
        "none": torch.zeros_like(noise_CM),
        "noise": noise_CM,
        "NaN": noise_CM.where(noise_CM < 2, torch.nan),
        "infinity": noise_CM.where(noise_CM < 2, -torch.inf),
    }[kind]
    size_CM = (x_CM.view(torch.int32) & 0x7FFF_FFFF).to(torch.int64)
    expected_CK = torch.sort(-size_CM, dim=1, stable=True).indices[:, :k].sort(1).values
    assert torch.equal(largest_of_chunks(x_CM, k), expected_CK)
