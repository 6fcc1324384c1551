"""Writes vectors.json: frames and digests that pin the formats.

Run it by hand, and only together with a new ``version`` of each codec whose frames change.
"""

import base64
import hashlib
import json
from pathlib import Path

import torch

from atoll.compression import parse

FILE = Path(__file__).with_name("vectors.json")
CASES = [
    ("fp32", (20,)),
    ("fp16", (300,)),
    ("bf16", (300,)),
    ("int8", (300,)),
    ("int8-dynamic", (300,)),
    ("int8-uniform", (300,)),
    ("int4", (300,)),
    ("fp4", (300,)),
    ("nf4", (300,)),
    ("2bit", (300,)),
    ("ternary(seed=1)", (300,)),
    ("ternary(block=128, stochastic=False)", (300,)),
    ("sign", (300,)),
    ("topk(k=256)", (70, 70)),
    ("topk(k=256)+2bit", (70, 70)),
    ("randk(k=64, seed=1)", (70, 70)),
    ("randk(k=64, scaled=False, seed=1)+int8", (70, 70)),
    ("dct(k=64)", (70, 70)),
    ("dct(k=64, bits=1)", (5_000,)),
    ("dct", (1,)),
    ("powersgd(rank=2)+int8", (70, 70)),
    ("powersgd(rank=3)", (300,)),
    ("lgreco", (300,)),
    ("zstd(int4)", (300,)),
    ("zstd(topk(k=8)+2bit)", (70, 70)),
    ("mixed(*.bias=fp16, *=int4)", (300,)),
    ("feedback(int8)", (300,)),
]


def values(shape):
    """Return integers hashed to heavy-tailed values; no library function is involved."""
    numel = torch.Size(shape).numel()
    words = (torch.arange(1, numel + 1) * 2_654_435_761) % 2**32
    unit = (words.to(torch.float64) / 2**31 - 1).to(torch.float32)
    return (unit * unit * unit).view(shape)


def digest(tensor):
    """Return the SHA-256 of the fp32 bits, as hex."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def vector(spec, shape):
    """Return one case: what is decoded, and to what."""
    codec = parse(spec)
    frame = codec.encode(values(shape))
    return {
        "spec": spec,
        "version": codec.version,
        "shape": shape,
        "frame": base64.b64encode(frame).decode(),
        "decoded_sha256": digest(codec.decode(frame, shape)),
    }


def main():
    """Write the file."""
    FILE.write_text(json.dumps([vector(*case) for case in CASES], indent=1) + "\n")


if __name__ == "__main__":
    main()
