"""Merging sparse frames, and frames that are refused."""

import pytest
import torch

from atoll.compression import CodecError, TopK, merge, parse


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
