import numpy as np
import pytest

from atoll.peer.errors import DataError
from atoll.peer.training.data import load as data
from support.texts import make_tokenizer


def test_a_tokenizers_file_encodes_and_decodes(tmp_path):
    tokenizer = data.open_tokenizer(make_tokenizer(tmp_path / "t.json"))
    tokens = tokenizer.encode("the sea … über".encode())
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed(int(token)) for token in tokens) == "the sea … über"
    assert tokenizer.end_token == 0
    assert tokens.dtype == np.uint16 and int(tokens.max()) < tokenizer.vocab_size


def test_a_missing_tokenizer_is_named():
    pytest.importorskip("tokenizers")
    with pytest.raises(
        DataError, match=r"expected 'bytes' or a tokenizers JSON file, got 'no\.json'"
    ):
        data.open_tokenizer("no.json")


def test_bytes_decode_character_by_character():
    decoder = data.ByteTokenizer().decoder()
    parts = [decoder.feed(byte) for byte in "aß€".encode() + b"\xffb\xc3("]
    assert parts == ["a", "", "ß", "", "", "€", "�", "b", "", "�("]
