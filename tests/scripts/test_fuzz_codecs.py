"""A slice of scripts/fuzz_codecs.py, which sends a million messages."""

import fuzz_codecs

from atoll.compression import names, parse


def test_mutated_messages_are_refused_or_finite():
    refused, decoded, _ = fuzz_codecs.fuzz(5_000, seed=1)
    assert refused > 3_000
    assert decoded > 200


def test_every_codec_is_fuzzed():
    assert {parse(spec).name for spec in fuzz_codecs.SPECS} == set(names())
