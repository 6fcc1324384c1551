"""A slice of scripts/fuzz_codecs.py, which sends a million messages."""

import importlib.util
from pathlib import Path

from atoll.compression import names, parse

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_codecs.py"


def load():
    spec = importlib.util.spec_from_file_location("fuzz_codecs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mutated_messages_are_refused_or_finite():
    refused, decoded, _ = load().fuzz(5_000, seed=1)
    assert refused > 3_000
    assert decoded > 200


def test_every_codec_is_fuzzed():
    assert {parse(spec).name for spec in load().SPECS} == set(names())
