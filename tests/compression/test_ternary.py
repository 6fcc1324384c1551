import torch

from atoll.compression.kernels.planes import pack_weighted
from atoll.compression.ternary import WEIGHTS, unpack_digits


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
