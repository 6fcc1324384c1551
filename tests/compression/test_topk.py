import pytest
import torch

from atoll.compression import parse


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
