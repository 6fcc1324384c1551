"""Top-k takes the largest; index sets merge as dense tensors would add."""

import pytest
import torch

from atoll.compression import CodecError, TopK, merge, parse
from atoll.compression.kernels.planes import (
    pack_,
    pack_runs_,
    pack_weighted,
    packed_bytes,
    plane_bytes,
    unpack,
    unpack_runs,
)
from atoll.compression.randk import draw
from atoll.compression.ternary import WEIGHTS, unpack_digits


@pytest.mark.parametrize("k", [1, 8, 64, 128, 129, 500, 4_096])
def test_topk_keeps_exactly_the_largest(k):
    x = torch.randn(3 * 4_096 + 1_000)
    codec = parse(f"topk(k={k})+fp32")
    decoded = codec.decode(codec.encode(x), x.shape)
    for start in range(0, x.numel(), 4_096):
        chunk, got = x[start : start + 4_096], decoded[start : start + 4_096]
        count = -(-k * chunk.numel() // 4_096)
        expected = torch.zeros_like(chunk)
        at = chunk.abs().topk(count).indices
        expected[at] = chunk[at]
        assert torch.equal(got, expected)


def test_topk_of_equal_values_is_valid():
    x = torch.ones(10_000)
    codec = parse("topk")
    assert int((codec.decode(codec.encode(x), 10_000) != 0).sum()) == 64 * 2 + 29


@pytest.mark.parametrize("spec", ["topk(k=64)+fp32", "randk(k=64, scaled=False)+fp32"])
def test_merge_is_the_sum_of_the_dense_tensors(spec):
    codec = parse(spec)
    inputs = [torch.randn(9_000) for _ in range(5)]
    frames = [codec.encode(x) for x in inputs]
    weights = [0.5, 0.25, 2.0, 1.0, 0.125]
    parts = [codec.sparse(frame, 9_000) for frame in frames]
    merged = merge(parts, weights)
    expected = sum(w * codec.decode(f, 9_000) for w, f in zip(weights, frames, strict=True))
    assert torch.allclose(merged.dense(), expected, rtol=1e-6, atol=1e-6)
    assert bool((merged.indices[1:] > merged.indices[:-1]).all())
    assert torch.equal(parts[0].dense(), codec.decode(frames[0], 9_000))


def test_union_of_members_survives_the_way_down():
    codec = parse("topk(k=64)+fp32")
    assert isinstance(codec, TopK)
    parts = [codec.sparse(codec.encode(torch.randn(70_000)), 70_000) for _ in range(4)]
    merged = merge(parts, [0.25] * 4)
    down = codec.for_union(4)
    got = down.decode(down.encode(merged.dense()), 70_000)
    assert torch.equal(got, merged.dense())


def test_merge_refuses_other_shapes():
    codec = parse("topk")
    a, b = (codec.sparse(codec.encode(torch.randn(n)), n) for n in (500, 600))
    with pytest.raises(CodecError, match="one shape"):
        merge([a, b], [1.0, 1.0])


def test_sparse_of_an_empty_tensor():
    codec = parse("topk")
    assert codec.sparse(codec.encode(torch.zeros(0)), 0).dense().shape == (0,)


def test_repeated_index_is_refused():
    import zlib

    codec = parse("topk(k=4096)+fp32")
    frame = bytearray(codec.encode(torch.randn(10)))
    frame[8 + 40 + 1] = 0  # the second index becomes the first
    body = bytes(frame[8:])
    head = bytes(frame[:4])
    frame[4:8] = zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little")
    with pytest.raises(CodecError, match="rising"):
        codec.decode(frame, 10)


@pytest.mark.parametrize("numel", [1, 100, 4_096, 70_001])
@pytest.mark.parametrize("k", [1, 64, 4_096])
def test_drawn_indices_are_distinct_and_in_their_chunk(numel, k):
    for seed in (0, 1, 2**64 - 1):
        at = draw(numel, k, seed, torch.device("cpu"))
        assert len(at.unique()) == len(at)
        assert 0 <= int(at.min()) <= int(at.max()) < numel


def test_every_index_is_drawn_equally_often():
    counts = torch.zeros(300)
    for seed in range(6_000):
        counts[draw(300, 512, seed * 7_919, torch.device("cpu"))] += 1
    expected = 6_000 * 38 / 300
    z = (counts - expected) / (expected * (1 - 38 / 300)) ** 0.5
    assert float(z.abs().max()) < 5
    assert 0.6 < float(z.square().mean()) < 1.5


@pytest.mark.parametrize("numel", [1, 7, 8, 65, 4_096, 65_536, 65_537, 140_000])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_planes_round_trip(numel, bits):
    codes = torch.randint(1 << bits, (numel,), dtype=torch.uint8)
    out = torch.empty(packed_bytes(numel, 8 // bits), dtype=torch.uint8)
    pack_runs_(codes.clone(), bits, out)
    assert torch.equal(unpack_runs(out, bits, numel), codes)


@pytest.mark.parametrize("numel", [3, 65_536, 2 * 65_536])
def test_planes_in_the_high_half(numel):
    codes = torch.randint(-8, 8, (numel,), dtype=torch.int8)
    out = torch.empty(numel // min(numel, 65_536) * plane_bytes(min(numel, 65_536), 2))
    out = out.to(torch.uint8)
    pack_(codes & 0xF, 4, out, numel)
    assert torch.equal(unpack(out, 4, numel, high=True).view(torch.int8), codes * 16)


def test_all_values_of_five_digits_round_trip():
    digits = torch.cartesian_prod(*[torch.arange(-1.0, 2.0)] * 5).flip(1)
    planes = torch.nn.functional.pad(digits.T.contiguous(), (0, 5)).view(-1)  # 243 columns to 248
    out, decoded = torch.empty(248, dtype=torch.uint8), torch.empty(5 * 248)
    pack_weighted(planes, WEIGHTS, out, 5 * 248)
    unpack_digits(out, decoded)
    assert torch.equal(decoded, planes)


def test_every_byte_is_five_digits():
    decoded = torch.empty(5 * 256)
    unpack_digits(torch.arange(256, dtype=torch.uint8), decoded)
    values = (decoded.view(5, 256) * torch.tensor(WEIGHTS).unsqueeze(1)).sum(0)
    assert torch.equal(values, torch.arange(256, dtype=torch.uint8).view(torch.int8).float())
    assert int(decoded.abs().max()) == 2
    assert int(decoded.view(5, 256)[:, torch.arange(-121, 122)].abs().max()) == 1
