"""Formats do not change by accident, and decode to the same bits on every kind of CPU."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.compression import names, parse

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())

DECODE_ALL = """
import base64, hashlib, json, sys
import torch
from atoll.compression import parse
for case in json.load(sys.stdin):
    frame = base64.b64decode(case["frame"])
    bits = parse(case["spec"]).decode(frame, case["shape"]).view(torch.uint8)
    print(hashlib.sha256(bits.numpy().tobytes()).hexdigest())
"""


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["spec"])
def test_checked_in_frame_decodes_to_its_digest(case):
    codec = parse(case["spec"])
    assert codec.version == case["version"]
    decoded = codec.decode(base64.b64decode(case["frame"]), case["shape"])
    assert digest(decoded) == case["decoded_sha256"]


def test_every_codec_has_a_vector():
    assert {parse(case["spec"]).name for case in VECTORS} == set(names())


def test_older_instruction_sets_decode_the_same_bits():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", DECODE_ALL],
        input=json.dumps(VECTORS),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.split() == [case["decoded_sha256"] for case in VECTORS]


@pytest.mark.cuda
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["spec"])
def test_gpu_decodes_the_same_bits_and_encodes_decodable_frames(case):
    codec, shape = parse(case["spec"]), case["shape"]
    decoded = codec.decode(base64.b64decode(case["frame"]), shape, device="cuda")
    assert digest(decoded.cpu()) == case["decoded_sha256"]
    x = torch.randn(shape, device="cuda")
    frame = codec.encode(x)
    here, there = codec.decode(frame, shape), codec.decode(frame, shape, device="cuda")
    assert torch.equal(here, there.cpu())
