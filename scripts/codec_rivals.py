"""Codecs of other libraries behind one interface, for scripts/bench_codecs.py.

Each entry of `available()` is a `Rival`: `encode(x)` returns the library's own message, `decode`
inverts it, and `wire_bytes` counts the bytes that would travel (without any framing). Libraries
that are not installed are left out.
"""

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Rival:
    name: str
    encode: Callable[[torch.Tensor], Any]
    decode: Callable[[Any], torch.Tensor]
    wire_bytes: Callable[[Any], int]
    max_values: int = 1 << 22  # in a measurement; fewer if the codec is slow


def available():
    """Return the rivals whose libraries are installed."""
    warnings.filterwarnings("ignore")
    found = [*zstandard_rivals(), demo_reference(), powersgd_hook()]
    for library, make in OPTIONAL.items():
        try:
            importlib.import_module(library)
        except ImportError:
            continue
        found += make()
    return found


def hivemind_rivals():
    from hivemind.compression import CompressionInfo
    from hivemind.compression import quantization as theirs
    from hivemind.compression.floating import Float16Compression, ScaledFloat16Compression

    class Uniform(theirs.Uniform8BitQuantization):
        """With the numpy 2 TypeError of `extract` patched: it converts a 1-element array to int."""

        def extract(self, serialized_tensor):
            head = serialized_tensor.buffer[:8]
            size = int.from_bytes(head, "little")
            np = theirs.np
            codebook = np.frombuffer(serialized_tensor.buffer, offset=8, count=size, dtype="f4")
            codes = np.frombuffer(serialized_tensor.buffer, offset=8 + 4 * size, dtype="u1")
            index = torch.as_tensor(codes, dtype=torch.int64).reshape(tuple(serialized_tensor.size))
            return torch.as_tensor(codebook)[index]

    class Quantile(theirs.Quantile8BitQuantization):
        extract = Uniform.extract

    def rival(name, codec, max_values=1 << 22):
        return Rival(
            name=f"hivemind {name}",
            encode=lambda x: codec.compress(x, CompressionInfo.from_tensor(x)),
            decode=codec.extract,
            wire_bytes=lambda message: len(message.buffer),
            max_values=max_values,
        )

    return [
        rival("uniform 8-bit", Uniform()),
        rival("quantile 8-bit", Quantile(), 1 << 22),
        rival("fp16", Float16Compression()),
        rival("scaled fp16", ScaledFloat16Compression(), 1 << 22),
    ]


def bitsandbytes_rivals():
    import bitsandbytes.functional as theirs

    def blockwise(block):
        return Rival(
            name=f"bitsandbytes dynamic 8-bit, block {block}",
            encode=lambda x: theirs.quantize_blockwise(x, blocksize=block),
            decode=lambda pair: theirs.dequantize_blockwise(*pair),
            wire_bytes=lambda pair: pair[0].numel() + 4 * pair[1].absmax.numel(),
        )

    def four_bit(kind):
        return Rival(
            name=f"bitsandbytes {kind}, block 64",
            encode=lambda x: theirs.quantize_4bit(x, blocksize=64, quant_type=kind),
            decode=lambda pair: theirs.dequantize_4bit(*pair),
            wire_bytes=lambda pair: pair[0].numel() + 4 * pair[1].absmax.numel(),
            max_values=1 << 22,
        )

    return [blockwise(256), blockwise(4096), four_bit("nf4"), four_bit("fp4")]


def torchao_rivals():
    from torchao.quantization import quant_primitives as theirs

    def affine(bits, group):
        high = 2 ** (bits - 1) - 1
        block, limits = (1, group), (-high - 1, high)

        def encode(x):
            rows = x.view(-1, group)
            scale, zero = theirs.choose_qparams_affine(
                rows, theirs.MappingType.SYMMETRIC, block, torch.int8, *limits
            )
            codes = theirs.quantize_affine(rows, block, scale, zero, torch.int8, *limits)
            return codes, scale, zero

        def decode(message):
            codes, scale, zero = message
            out = theirs.dequantize_affine(codes, block, scale, zero, torch.int8, *limits)
            return out.view(-1)

        return Rival(
            name=f"torchao int{bits}, group {group}",
            encode=encode,
            decode=decode,
            wire_bytes=lambda message: message[0].numel() * bits // 8 + 4 * message[1].numel(),
        )

    return [affine(8, 256), affine(4, 64)]


def zstandard_rivals():
    import zstandard

    def encode(x):
        return zstandard.ZstdCompressor(level=3).compress(x.numpy().tobytes())

    def decode(data):
        raw = zstandard.ZstdDecompressor().decompress(data)
        return torch.frombuffer(bytearray(raw), dtype=torch.float32)

    return [
        Rival(name="zstd level 3", encode=encode, decode=decode, wire_bytes=len, max_values=1 << 22)
    ]


def demo_reference(k=32):
    """Return DeMo's compressor as published: einsum over 64 x 64 chunks, top-k, scatter."""
    side = 64
    n = torch.arange(side, dtype=torch.float64)
    basis = torch.cos(n.unsqueeze(1) * (n + 0.5) * math.pi / side) * math.sqrt(2 / side)
    basis[0] *= math.sqrt(0.5)
    forward = basis.T.to(torch.float32).contiguous()
    backward = basis.to(torch.float32).contiguous()

    def encode(x):
        width = 4096 if x.numel() % (side * 4096) == 0 else side
        chunks = x.view(-1, side, width // side, side).transpose(1, 2)
        freq = torch.einsum("...ij, jb, ia -> ...ab", chunks, forward, forward)
        flat = freq.flatten(-2)
        index = torch.topk(flat.abs(), k=k, dim=-1, largest=True, sorted=False).indices
        return index, torch.gather(flat, -1, index), freq.shape

    def decode(message):
        index, values, shape = message
        flat = torch.zeros(*shape[:-2], side * side)
        flat.scatter_reduce_(-1, index, values, reduce="mean", include_self=False)
        chunks = torch.einsum("...ij, jb, ia -> ...ab", flat.view(shape), backward, backward)
        return chunks.transpose(1, 2).reshape(-1)

    return Rival(
        name=f"DeMo reference, k={k}",
        encode=encode,
        decode=decode,
        wire_bytes=lambda message: 12 * message[0].numel(),
        max_values=10_485_760,
    )


def powersgd_hook(rank=4):
    """Return PyTorch's DDP hook on one square matrix, with one worker; encoding is the whole."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Bucket:
        def __init__(self, x):
            self.flat = x.clone()

        def buffer(self):
            return self.flat

        def gradients(self):
            return [self.flat.view(2 ** (self.flat.numel().bit_length() // 2), -1)]

        def index(self):
            return 0

        def is_last(self):
            return True

    def encode(x):
        state = theirs.PowerSGDState(
            dist.group.WORLD, rank, start_powerSGD_iter=2, use_error_feedback=False
        )
        state.iter = 2
        bucket = Bucket(x)
        theirs.powerSGD_hook(state, bucket).wait()
        return bucket

    return Rival(
        name=f"PyTorch PowerSGD hook, rank {rank}",
        encode=encode,
        decode=lambda bucket: bucket.flat,
        wire_bytes=lambda bucket: 4 * rank * sum(bucket.gradients()[0].shape),
        max_values=1 << 22,
    )


OPTIONAL = {
    "hivemind": hivemind_rivals,
    "bitsandbytes": bitsandbytes_rivals,
    "torchao": torchao_rivals,
}
