import pytest
import torch

from atoll.compression.kernels.planes import (
    pack_,
    pack_runs_,
    packed_bytes,
    plane_bytes,
    unpack,
    unpack_runs,
)


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
