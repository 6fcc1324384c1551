#!/usr/bin/env python
"""Feed mutated frames to every codec: each must decode to finite numbers or raise CodecError.

    .venv/bin/python scripts/fuzz_codecs.py --messages 1000000

Mutations are bit flips, overwritten bytes, truncation, extension, copied runs and plain noise. Half
of the messages get a correct checksum afterwards, as a hostile sender would provide. A message that
takes a second of CPU time or allocates far more than its tensor is a failure too.
"""

import argparse
import random
import resource
import sys
import time

import torch

from atoll.compression import CodecError, parse
from atoll.compression.checksum import Checksum

SPECS = [
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "int8-dynamic",
    "int8-uniform",
    "int4",
    "fp4",
    "nf4",
    "2bit",
    "ternary",
    "ternary(block=64, stochastic=False)",
    "sign",
    "topk",
    "topk(k=64)+2bit",
    "randk",
    "randk(scaled=False)+int8",
    "dct",
    "dct(bits=1)",
    "powersgd",
    "powersgd(rank=2)+int8",
    "lgreco",
    "zstd(int4)",
    "zstd(topk(k=64)+2bit)",
    "mixed(*.bias=fp16, *=int4)",
    "feedback(int8)",
]
SHAPES = [(1,), (40,), (300,), (64, 9), (3, 5, 7)]
MAX_SECONDS = 1.0
MAX_MEMORY_GROWTH_KIB = 256 * 1024


def mutate(rng, frame):
    """Return a damaged copy of a frame."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind = rng.randrange(7)
        at = rng.randrange(len(data)) if data else 0
        if not data or kind == 0:
            data += rng.randbytes(rng.choice((1, 2, 8, 100)))
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            length = rng.randrange(1, 9)
            data[at : at + length] = rng.randbytes(len(data[at : at + length]))
        elif kind == 5:
            source = rng.randrange(len(data))
            data[at : at + 8] = data[source : source + len(data[at : at + 8])]
        else:
            data[8:] = rng.randbytes(max(0, len(data) - 8))
    return data


def reseal(data):
    """Correct the checksum of a damaged frame."""
    if len(data) >= 8:
        payload = torch.frombuffer(bytearray(data[8:]) or bytearray(1), dtype=torch.uint8)
        seal = Checksum(payload[: len(data) - 8]).value(bytes(data[:4]))
        data[4:8] = seal.to_bytes(4, "little")
    return data


def attack(rng, codec, frame, shape):
    """Send one mutated frame; return whether it was refused.

    Raises AssertionError, and any exception of a codec other than CodecError.
    """
    data = mutate(rng, frame)
    if rng.random() < 0.5:
        data = reseal(data)
    started = time.thread_time()
    try:
        decoded = codec.decode(data, shape)
    except CodecError:
        return True
    finally:
        assert time.thread_time() - started < MAX_SECONDS, "a message took too long"
    assert tuple(decoded.shape) == shape
    assert bool(decoded.isfinite().all()), "a decoded value is not finite"
    return False


def targets():
    """Return every codec with a frame of each shape."""
    torch.manual_seed(0)
    return [
        (codec, codec.encode(torch.randn(shape)), shape)
        for codec in map(parse, SPECS)
        for shape in SHAPES
    ]


def fuzz(messages, seed):
    """Send this many messages; return (refused, decoded, KiB of memory growth)."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    everything = targets()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(messages):
        codec, frame, shape = everything[number % len(everything)]
        refused += attack(rng, codec, frame, shape)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < MAX_MEMORY_GROWTH_KIB, f"memory grew by {growth} KiB"
    return refused, messages - refused, growth


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--messages",
        type=int,
        default=1_000_000,
        help="number of mutated frames (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the mutations (default %(default)s)"
    )
    options = parser.parse_args()
    started = time.monotonic()
    refused, decoded, growth = fuzz(options.messages, options.seed)
    print(
        f"{options.messages} messages, {len(SPECS)} codecs, {time.monotonic() - started:.0f} s: "
        f"{refused} refused, {decoded} decoded to finite numbers, memory +{growth} KiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
