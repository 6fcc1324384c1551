"""Tokenizers that `atoll tokenizer` trains, with the real library."""

import json

import pytest

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.cli import main as cli
from atoll.peer.errors import DataError
from atoll.peer.training.data.documents import Document
from atoll.peer.training.data.load import open_tokenizer
from atoll.peer.training.data.tokenizer_training import SMALLEST, train_tokenizer
from atoll.peer.training.digests import read_tokenizer

TEXT = "The coral grows; the corals grow slowly. def f(x):\n    return x * 1234567\n" * 30
ANY = "Grüße, 日本語 👩‍👩‍👧 \0\x7f\r\n\t  of 10,000 " + "a" * 40


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def docs(*texts):
    return [Document(key=str(i), data=text.encode()) for i, text in enumerate(texts)]


def test_the_same_text_gives_the_same_file_and_any_text_comes_back(tmp_path):
    one, two = (train_tokenizer(docs(TEXT, TEXT[:500]), 280) for _ in range(2))
    assert one == two
    assert one.vocab_size == 280 and one.bytes_per_token > 1.5
    (tmp_path / "tokenizer.json").write_text(one.json, encoding="utf-8")
    opened = open_tokenizer(str(tmp_path))  # the folder that holds it
    assert opened.vocab_size == 280 and opened.end_token == 0
    tokens = opened.encode(ANY.encode())
    decoder = opened.decoder()
    assert "".join(decoder.feed(int(token)) for token in tokens) == ANY
    assert len(opened.encode(TEXT.encode())) < len(TEXT) / 1.5
    spec = RunSpec.from_dict({"data": {"tokenizer": str(tmp_path)}})
    assert read_tokenizer(spec) == one.json.encode()


def test_numbers_are_cut_into_three_digits_and_words_keep_their_space():
    merges = json.loads(train_tokenizer(docs("123456789 " * 99, " coral" * 99), 290).json)
    tokens = merges["model"]["vocab"]
    assert {"123", "456", "Ġcoral"} <= set(tokens) and "1234" not in tokens


def test_progress_is_reported(monkeypatch):
    monkeypatch.setattr("atoll.peer.training.data.tokenizer_training.REPORT_BYTES", 1000)
    said = []
    train_tokenizer(docs("abc " * 200, "abc " * 300, "x"), SMALLEST, say=said.append)
    assert said == ["read 0 MB", "read 0.0 MB; merging"]


@pytest.mark.parametrize("size", [256, 0, -5, 1 << 30])
def test_a_size_out_of_range_is_refused(size):
    with pytest.raises(DataError, match="expected a vocabulary of 257"):
        train_tokenizer(docs(TEXT), size)


def test_no_text_is_refused():
    with pytest.raises(DataError, match="expected text to train a tokenizer on, got none"):
        train_tokenizer(docs(), 300)


def test_the_command_writes_a_new_file_only(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"body": "aab " * 9}) + "\n")
    out = tmp_path / "t.json"
    words = ["tokenizer", "--data", str(tmp_path / "text"), "--text-field", "body"]
    words += ["--vocab-size", "4000", "--out", str(out)]
    assert cli.main(words) == 0
    told = capsys.readouterr().err
    assert "tokens (of 4,000: the text has no more pairs)" in told
    before = out.read_bytes()
    assert cli.main(words) == 2
    assert "exists and was not changed" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert cli.main([*words[:-1], str(tmp_path / "nowhere" / "t.json")]) == 2
