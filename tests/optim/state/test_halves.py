import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.optim.state import halves

LARGEST = 0x7F7F  # bits of the largest bf16


def of_bits(*bits: int) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


def stored(values: torch.Tensor) -> list[int]:
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    halves.store_(out, values)
    return [bits & 0xFFFF for bits in out.view(torch.int16).reshape(-1).tolist()]


def exact(half: int) -> Fraction:
    """The value of a bf16; that of its bits as if exponents went on, for infinity."""
    sign, exponent, mantissa = half >> 15, half >> 7 & 0xFF, half & 0x7F
    size = Fraction(mantissa + 128 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 134)
    return -size if sign else size


def nearest_even(bits: int) -> int:
    """Round a finite fp32 to bf16 by exact fractions alone."""
    value = Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])
    sign, below = bits >> 31 << 15, bits >> 16 & 0x7FFF
    return sign | min(
        (below, below + 1), key=lambda half: (abs(exact(half) - abs(value)), half & 1)
    )


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_rounding_is_to_the_nearest_and_ties_to_even(bits):
    finite = [each for each in bits if each & 0x7F800000 != 0x7F800000] or [0]
    assert stored(of_bits(*finite)) == [nearest_even(each) for each in finite]


@given(st.integers(0, 0xFFFF), st.sampled_from([0x7FFF, 0x8000, 0x8001]))
def test_what_lies_halfway_goes_to_the_even_one(half, rest):
    bits = half << 16 | rest
    if bits & 0x7F800000 != 0x7F800000:
        assert stored(of_bits(bits)) == [nearest_even(bits)]


def test_a_value_beyond_the_largest_is_infinite_and_stays_so():
    beyond, infinite, nan = 0x7F7FFFFF, 0xFF800000, 0x7FC00000
    assert stored(of_bits(beyond, infinite, nan)) == [LARGEST + 1, 0xFF80, 0x7FC0]


def test_every_bf16_comes_back():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    wide = halves.widened(every)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.view(torch.int32) & 0xFFFF, torch.zeros(1 << 16, dtype=torch.int32))
    again = torch.empty_like(every)
    halves.store_(again, wide)
    assert torch.equal(again.view(torch.int16), every.view(torch.int16))


def test_vectors_longer_than_a_run_and_places_in_a_matrix_round_alike():
    values = torch.randn(3 * halves.AT_ONCE + 5, generator=torch.Generator().manual_seed(0))
    out = torch.empty(len(values), dtype=torch.bfloat16)
    halves.store_(out, values)
    assert torch.equal(out, values.to(torch.bfloat16))  # torch rounds normal numbers so too
    matrix = torch.zeros(10, 20, dtype=torch.bfloat16)
    halves.store_(matrix[2:5, 3:9], values[:18].view(3, 6))
    assert torch.equal(matrix[2:5, 3:9], out[:18].view(3, 6))
    assert int(matrix.count_nonzero()) == 18
    assert torch.equal(halves.widened(matrix[2:5, 3:9]), out[:18].view(3, 6).float())


def test_fp32_is_stored_as_it_is():
    values, out = torch.randn(7), torch.empty(7)
    halves.store_(out, values)
    assert torch.equal(out, values)
    assert halves.widened(out) is out
    assert torch.equal(halves.widen_(torch.empty(7), out), values)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_found(value):
    vector = torch.ones(halves.AT_ONCE + 3, dtype=torch.bfloat16)
    assert halves.are_finite(vector)
    vector[-1] = value
    assert not halves.are_finite(vector)


def test_scratch_of_inference_mode_is_used_again_outside_it():
    numel = halves.AT_ONCE - 1_234  # a length that no other test takes
    with torch.inference_mode():
        stored(torch.ones(numel))
    assert stored(torch.ones(numel)) == [0x3F80] * numel
