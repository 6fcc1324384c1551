import pytest
import torch

from atoll.compression.randk import draw


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
