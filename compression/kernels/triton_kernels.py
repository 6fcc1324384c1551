# type: ignore
# ruff: noqa: ANN001, ANN202, ANN401
# What Triton compiles has types of its own, and is not Python to a checker.
"""Kernels of codecs for CUDA, in Triton; `fused` imports this where Triton is and works.

As torch operations an encoder is ten passes over memory and more; a kernel here is one. Kernels of
blocks take whole tiles alone, whose planes and blocks are aligned. Products and sums are rounded as
on a CPU (`fma` where torch has `addcmul`, `div_rn`), so that frames have the same bits but where a
block's values are added up, whose order is each device's own. Decoders multiply once: they have the
same bits everywhere.

# K values of a block, G blocks at a time
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.compression.base import BF16_MAX, FLOAT_MAX, TINY, require_finite
from atoll.compression.scratch import TILE

AT_ONCE = 4096  # values of a plane that a program takes
PARTS = 256  # values whose largest magnitude `fp16` reports together
WARPS = 4

_TILE = tl.constexpr(TILE)
_TINY = tl.constexpr(float(TINY))
_FLOAT_MAX = tl.constexpr(FLOAT_MAX)
_BF16_MAX = tl.constexpr(BF16_MAX)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _peaks(x_GK):
    """Return the largest magnitudes, compared as integers: NaN above all."""
    bits_GK = x_GK.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits_GK, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _absmax(peaks_G, steps, alpha, limit):
    """Return bf16 scales and factors as `absmax_scales` with its headroom."""
    scales_G = tl.minimum(tl.fma(peaks_G, alpha, _TINY), limit).to(tl.bfloat16)
    ones_G = tl.full(peaks_G.shape, 1.0, tl.float32)
    inverse_G = tl.div_rn(ones_G, scales_G.to(tl.float32))
    most_G = tl.div_rn(ones_G, peaks_G) * steps
    return scales_G, tl.minimum(inverse_G, most_G)


@triton.jit
def _places(plane: tl.constexpr, planes: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """Return where this program's values, blocks and bytes of a plane are."""
    length: tl.constexpr = _TILE // planes
    tile = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (G * K)
    block = (tile * _TILE + plane * length + start) // K + tl.arange(0, G)
    at_GK = tl.arange(0, G)[:, None] * K + tl.arange(0, K)[None, :]
    return tile * _TILE + plane * length + start + at_GK, block, tile * length + start + at_GK


@triton.jit
def _write_int8(x, peaks, scales, codes, alpha, limit, K: tl.constexpr, G: tl.constexpr):
    values, block, byte = _places(0, 1, K, G)
    x_GK = tl.load(x + values)
    peaks_G = _peaks(x_GK)
    scales_G, factors_G = _absmax(peaks_G, 127.0, alpha, limit)
    tl.store(peaks + block, peaks_G)
    tl.store(scales + block, scales_G)
    rounded_GK = tl.fma(x_GK, factors_G[:, None], tl.full((G, K), _ROUNDER, tl.float32))
    tl.store(codes + byte, rounded_GK.to(tl.int32, bitcast=True).to(tl.int8))


@triton.jit
def _read_int8(codes, scales, out, K: tl.constexpr, G: tl.constexpr):
    values, block, byte = _places(0, 1, K, G)
    scales_G = tl.load(scales + block)
    tl.store(out + values, tl.load(codes + byte).to(tl.float32) * scales_G[:, None])


@triton.jit
def _write_int4(x, peaks, scales, codes, alpha, limit, K: tl.constexpr, G: tl.constexpr):
    packed_GK = tl.zeros((G, K), tl.int32)
    for plane in tl.static_range(2):
        values, block, _ = _places(plane, 2, K, G)
        x_GK = tl.load(x + values)
        peaks_G = _peaks(x_GK)
        scales_G, factors_G = _absmax(peaks_G, 112.0, alpha, limit)
        tl.store(peaks + block, peaks_G)
        tl.store(scales + block, scales_G)
        factors_G = factors_G * 0.0625
        rounded_GK = tl.fma(x_GK, factors_G[:, None], tl.full((G, K), _ROUNDER, tl.float32))
        packed_GK |= (rounded_GK.to(tl.int32, bitcast=True) & 0xF) << 4 * plane
    _, _, byte = _places(0, 2, K, G)
    tl.store(codes + byte, packed_GK.to(tl.uint8))


@triton.jit
def _read_int4(codes, scales, out, K: tl.constexpr, G: tl.constexpr):
    _, _, byte = _places(0, 2, K, G)
    packed_GK = tl.load(codes + byte).to(tl.int32)
    for plane in tl.static_range(2):
        values, block, _ = _places(plane, 2, K, G)
        scales_G = tl.load(scales + block)
        # The code in the high half of a byte, with its sign.
        code_GK = (packed_GK << 28 - 4 * plane) >> 24 & -16
        tl.store(out + values, code_GK.to(tl.float32) * scales_G[:, None])


@triton.jit
def _write_fp4(x, peaks, scales, codes, largest, least, K: tl.constexpr, G: tl.constexpr):
    packed_GK = tl.zeros((G, K), tl.int32)
    for plane in tl.static_range(4):
        values, block, _ = _places(plane, 4, K, G)
        x_GK = tl.load(x + values)
        peaks_G = _peaks(x_GK)
        tl.store(peaks + block, peaks_G)
        scales_G = tl.minimum(peaks_G, largest).to(tl.bfloat16).to(tl.float32) * 256.0
        scales_G = tl.minimum(scales_G, _BF16_MAX)
        tl.store(scales + block, scales_G.to(tl.bfloat16))
        least_G = (scales_G * least).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) - 128
        clipped_GK = tl.minimum(tl.maximum(x_GK, -largest), largest)
        bits_GK = clipped_GK.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        size_GK = tl.maximum(bits_GK & 0x7FFF, least_G[:, None]) - least_G[:, None]
        code_GK = (bits_GK >> 12 & 8) | (size_GK >> 7 & 7)
        packed_GK |= code_GK << 12 - 4 * plane
    _, _, word = _places(0, 4, K, G)
    tl.store(codes + word, packed_GK.to(tl.int16))


@triton.jit
def _read_fp4(codes, scales, out, K: tl.constexpr, G: tl.constexpr):
    _, _, word = _places(0, 4, K, G)
    packed_GK = tl.load(codes + word).to(tl.int32)
    for plane in tl.static_range(4):
        values, block, _ = _places(plane, 4, K, G)
        scales_G = tl.load(scales + block)
        code_GK = packed_GK >> 12 - 4 * plane
        exponent_GK = code_GK & 7
        bits_GK = tl.where(exponent_GK == 0, 0, exponent_GK + 112 << 23) | (code_GK & 8) << 28
        tl.store(out + values, bits_GK.to(tl.float32, bitcast=True) * scales_G[:, None])


@triton.jit
def _write_sign(x, means, scales, codes, share, limit, K: tl.constexpr, G: tl.constexpr):
    packed_GK = tl.zeros((G, K), tl.int32)
    for plane in tl.static_range(8):
        values, block, _ = _places(plane, 8, K, G)
        x_GK = tl.load(x + values)
        # Divided before they are added, so that nothing overflows.
        means_G = tl.sum(tl.abs(x_GK) * share, axis=1)
        tl.store(means + block, means_G)
        tl.store(scales + block, tl.minimum(means_G * 0.015625, limit).to(tl.bfloat16))
        packed_GK |= (x_GK < 0).to(tl.int32) << plane
    _, _, byte = _places(0, 8, K, G)
    tl.store(codes + byte, packed_GK.to(tl.uint8))


@triton.jit
def _read_sign(codes, scales, out, K: tl.constexpr, G: tl.constexpr):
    _, _, byte = _places(0, 8, K, G)
    packed_GK = tl.load(codes + byte).to(tl.int32)
    for plane in tl.static_range(8):
        values, block, _ = _places(plane, 8, K, G)
        scales_G = tl.load(scales + block)
        code_GK = tl.where((packed_GK >> plane & 1) == 1, -64.0, 64.0)
        tl.store(out + values, code_GK * scales_G[:, None])


@triton.jit
def _mean(low, high, share, low_edge, high_edge):
    """Return the mean of t in a bin of which so much lies below each end, between its edges."""
    mean = tl.div_rn(low - high, tl.maximum(share, 1e-6))
    return tl.minimum(tl.maximum(mean, low_edge), high_edge)


@triton.jit
def _write_2bit(
    x, measures, scales, codes, width, finest, below, share, root, K: tl.constexpr, G: tl.constexpr
):
    packed_GK = tl.zeros((G, K), tl.int32)
    for plane in tl.static_range(4):
        values, block, _ = _places(plane, 4, K, G)
        x_GK = tl.load(x + values)
        unit_G = _peaks(x_GK)
        ones_G = tl.full(unit_G.shape, 1.0, tl.float32)
        inverse_G = tl.div_rn(ones_G, unit_G + _TINY)
        unit_GK = x_GK * inverse_G[:, None]
        mean_G = tl.sum(unit_GK, axis=1) * share
        rms_G = tl.sqrt_rn(tl.sum(unit_GK * unit_GK, axis=1)) * root
        variance_G = tl.maximum(rms_G * rms_G - mean_G * mean_G, 0.0)
        step_G = tl.maximum(tl.sqrt_rn(variance_G) * width, rms_G * finest) + _TINY
        gain_G = tl.minimum(tl.div_rn(inverse_G, step_G), _FLOAT_MAX)
        offset_G = 2.0 - tl.div_rn(mean_G, step_G)
        t_GK = x_GK * gain_G[:, None] + offset_G[:, None]
        bin_GK = tl.minimum(tl.maximum(t_GK, 0.0), below).to(tl.int32)
        packed_GK |= bin_GK << 2 * plane
        # As `store_sums`, `store_counts` and `bin_means`: sums of max(t, j), shares from j on.
        from1_G = tl.sum((bin_GK > 0).to(tl.float32), axis=1) * share
        from2_G = tl.sum((bin_GK > 1).to(tl.float32), axis=1) * share
        from3_G = tl.sum((bin_GK > 2).to(tl.float32), axis=1) * share
        above1_G = tl.sum(tl.maximum(t_GK, 1.0), axis=1) * share - (1 - from1_G)
        above2_G = tl.sum(tl.maximum(t_GK, 2.0), axis=1) * share - (1 - from2_G) * 2.0
        above3_G = tl.sum(tl.maximum(t_GK, 3.0), axis=1) * share - (1 - from3_G) * 3.0
        mean0_G = _mean(2.0, above1_G, 1 - from1_G, -3.0e38, 1.0)
        mean1_G = _mean(above1_G, above2_G, from1_G - from2_G, 1.0, 2.0)
        mean2_G = _mean(above2_G, above3_G, from2_G - from3_G, 2.0, 3.0)
        mean3_G = _mean(above3_G, 0.0, from3_G, 3.0, 3.0e38)
        _store_mean(scales + 4 * block, mean0_G, mean_G, step_G, unit_G)
        _store_mean(scales + 4 * block + 1, mean1_G, mean_G, step_G, unit_G)
        _store_mean(scales + 4 * block + 2, mean2_G, mean_G, step_G, unit_G)
        _store_mean(scales + 4 * block + 3, mean3_G, mean_G, step_G, unit_G)
        tl.store(measures + 3 * block, unit_G)
        tl.store(measures + 3 * block + 1, mean_G)
        tl.store(measures + 3 * block + 2, rms_G)
    _, _, byte = _places(0, 4, K, G)
    tl.store(codes + byte, packed_GK.to(tl.uint8))


@triton.jit
def _store_mean(scales, t_G, mean_G, step_G, unit_G):
    value_G = ((t_G - 2.0) * step_G + mean_G) * unit_G
    value_G = tl.minimum(tl.maximum(value_G, -_BF16_MAX), _BF16_MAX)
    tl.store(scales, value_G.to(tl.bfloat16))


@triton.jit
def _read_2bit(codes, scales, out, K: tl.constexpr, G: tl.constexpr):
    _, _, byte = _places(0, 4, K, G)
    packed_GK = tl.load(codes + byte).to(tl.int32)
    for plane in tl.static_range(4):
        values, block, _ = _places(plane, 4, K, G)
        low0_G = tl.load(scales + 4 * block)
        low1_G = tl.load(scales + 4 * block + 1)
        high0_G = tl.load(scales + 4 * block + 2)
        high1_G = tl.load(scales + 4 * block + 3)
        code_GK = packed_GK >> 2 * plane
        odd_GK = (code_GK & 1) == 1
        low_GK = tl.where(odd_GK, low1_G[:, None], low0_G[:, None])
        high_GK = tl.where(odd_GK, high1_G[:, None], high0_G[:, None])
        tl.store(out + values, tl.where((code_GK & 2) == 2, high_GK, low_GK))


@triton.jit
def _peak_of_parts(x, peaks, K: tl.constexpr, G: tl.constexpr):
    values, block, _ = _places(0, 1, K, G)
    tl.store(peaks + block, _peaks(tl.load(x + values)))


@triton.jit
def _write_fp16(x, factors, codes, K: tl.constexpr, G: tl.constexpr):
    values, _, _ = _places(0, 1, K, G)
    factor = tl.load(factors + tl.program_id(0))
    tl.store(codes + values, (tl.load(x + values) * factor).to(tl.float16))


@triton.jit
def _read_fp16(codes, scales, peaks, out, K: tl.constexpr, G: tl.constexpr):
    values, block, _ = _places(0, 1, K, G)
    scale = tl.load(scales + tl.program_id(0))
    x_GK = tl.load(codes + values).to(tl.float32) * scale
    tl.store(peaks + block, _peaks(x_GK))
    tl.store(out + values, x_GK)


@triton.jit
def _write_bf16(x, peaks, codes, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, mask=at < numel, other=0.0)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(peaks + tl.program_id(0), tl.max(bits, axis=0).to(tl.float32, bitcast=True))
    clipped = tl.minimum(tl.maximum(values, -_BF16_MAX), _BF16_MAX)
    tl.store(codes + at, clipped.to(tl.bfloat16), mask=at < numel)


@triton.jit
def _read_bf16(codes, peaks, out, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(codes + at, mask=at < numel, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(peaks + tl.program_id(0), tl.max(bits, axis=0).to(tl.float32, bitcast=True))
    tl.store(out + at, values, mask=at < numel)


def write_bf16(x_N: Tensor, codes_N: Tensor) -> Tensor:
    """Store values as bf16; return the largest magnitude, NaN or infinite if there is one."""
    peaks = x_N.new_empty(triton.cdiv(x_N.numel(), AT_ONCE))
    with torch.cuda.device(x_N.device):
        _write_bf16[(len(peaks),)](x_N, peaks, codes_N, x_N.numel(), SIZE=AT_ONCE, num_warps=WARPS)
    return peaks.amax()


def read_bf16(codes_N: Tensor, out_N: Tensor) -> Tensor:
    """Store values as fp32; return the largest magnitude, NaN or infinite if there is one."""
    peaks = out_N.new_empty(triton.cdiv(out_N.numel(), AT_ONCE))
    with torch.cuda.device(out_N.device):
        _read_bf16[(len(peaks),)](
            codes_N, peaks, out_N, out_N.numel(), SIZE=AT_ONCE, num_warps=WARPS
        )
    return peaks.amax()


def takes(name: str, block: int) -> bool:
    """Return whether there are kernels for a codec with blocks of this size."""
    if name == "fp16":
        return block == TILE
    return name in _WRITERS and block <= min(AT_ONCE, TILE // _WRITERS[name][1])


def write_tiles(
    codec: Any, x_M: Tensor, measures_BM: Tensor, scales_BS: Tensor, codes_M: Tensor
) -> None:
    """Store codes, scales, and measures as `BlockCodec._measure` does, of whole tiles."""
    if codec.name == "fp16":
        _write_tiles_fp16(codec, x_M, measures_BM, scales_BS, codes_M)
        return
    kernel, planes, constants = _WRITERS[codec.name]
    if codec.name == "fp4":
        codes_M = codes_M.view(torch.int16)
    arguments = (x_M, measures_BM, scales_BS, codes_M, *constants(codec))
    _by_tiles(kernel, x_M, planes, codec.block, *arguments)


def _write_tiles_fp16(
    codec: Any, x_M: Tensor, measures_BM: Tensor, scales_BS: Tensor, codes_M: Tensor
) -> None:
    """Look at a tile's magnitudes in parts, which are many programs, and then scale it."""
    peaks = x_M.new_empty((len(measures_BM), TILE // AT_ONCE))
    _by_tiles(_peak_of_parts, x_M, 1, AT_ONCE, x_M, peaks)
    torch.amax(peaks, 1, keepdim=True, out=measures_BM)
    factors_BF = codec._factors(measures_BM.clone(), scales_BS)  # it overwrites its argument
    _by_tiles(_write_fp16, x_M, 1, PARTS, x_M, factors_BF, codes_M)


def read_tiles(codec: Any, codes_M: Tensor, scales_BS: Tensor, out_M: Tensor) -> None:
    """Decode whole tiles; `scales_BS` are fp32 and finite."""
    if codec.name == "fp16":
        peaks = out_M.new_empty(out_M.numel() // PARTS)
        _by_tiles(_read_fp16, out_M, 1, PARTS, codes_M, scales_BS, peaks, out_M)
        require_finite(peaks, "values")
        return
    if codec.name == "fp4":
        codes_M = codes_M.view(torch.int16)
    planes = _WRITERS[codec.name][1]
    _by_tiles(_READERS[codec.name], out_M, planes, codec.block, codes_M, scales_BS, out_M)


def _by_tiles(kernel, x_M: Tensor, planes: int, block: int, *arguments: object) -> None:
    """Start a kernel over whole tiles: a program for each part of their planes."""
    plane = TILE // planes
    together = min(AT_ONCE, plane) // block
    grid = (x_M.numel() // TILE, plane // (together * block))
    with torch.cuda.device(x_M.device):
        kernel[grid](*arguments, K=block, G=together, num_warps=WARPS)


def _absmax_constants(steps: float):
    """Return the constants of `absmax_scales` with its own headroom."""
    return lambda codec: ((1 + 2**-8) / steps, BF16_MAX / codec.code_limit)


# Kernel, planes of its codes, and its constants by the codec's options. Those of `fp4`, `sign` and
# `2bit` are named in their modules.
_WRITERS = {
    "int8": (_write_int8, 1, _absmax_constants(127.0)),
    "int4": (_write_int4, 2, _absmax_constants(112.0)),
    "fp4": (_write_fp4, 4, lambda codec: (BF16_MAX / 256, 0.75 * 2.0**-14)),
    "sign": (_write_sign, 8, lambda codec: (1 / codec.block, BF16_MAX / codec.code_limit)),
    "2bit": (
        _write_2bit,
        4,
        lambda codec: (
            codec.width,
            2.0**-20,
            4.0 - 2.0**-21,
            1 / codec.block,
            codec.block**-0.5,
        ),
    ),
}
_READERS = {
    "int8": _read_int8,
    "int4": _read_int4,
    "fp4": _read_fp4,
    "sign": _read_sign,
    "2bit": _read_2bit,
}
