import json

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.cli import main
from atoll.peer.errors import DataError
from atoll.peer.training.data import load as data
from atoll.peer.training.data import shards
from atoll.peer.training.data.documents import text_digest, text_size
from atoll.peer.training.data.make_shards import make_shards

WORDS = ["the sea", "a low island", "closed ring", "of coral", "round a lagoon"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(40):
        text = ". ".join(WORDS[(number + i) % 5] + f" {number}" for i in range(20))
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    return tmp_path / "text"


@pytest.fixture
def spec(folder):
    return RunSpec.from_dict({"data": {"source": str(folder), "seq_len": 16}})


def opened(source):
    return data.open_corpus(str(source), seq_len=16)


def stream(corpus):
    return corpus.stream(seed=1, peer_id="alice", batch_size=4, seq_len=16)


def batches(corpus, count=5):
    one = stream(corpus)
    return [one.next_batch() for _ in range(count)]


def expect_same(one, other):
    assert all(map(torch.equal, batches(one), batches(other)))
    valid = [c.validation(batches=2, batch_size=3, seq_len=16) for c in (one, other)]
    assert all(map(torch.equal, *valid))


def rewrite(out, **changes):
    header = json.loads((out / shards.HEADER).read_text())
    (out / shards.HEADER).write_text(json.dumps(header | changes))


def test_shards_give_the_batches_of_their_text(spec, folder, tmp_path):
    summary = make_shards(spec, tmp_path / "out")
    text, tokens = opened(folder), opened(tmp_path / "out")
    expect_same(text, tokens)
    assert tokens.summary == text.summary == summary
    assert text_digest(str(tmp_path / "out")) == text_digest(str(folder)) == summary.sha256
    assert text_size(str(tmp_path / "out")) == 0


@pytest.mark.parametrize("shard_tokens", [1000, 7])
def test_a_text_in_many_files_is_the_same_text(spec, folder, tmp_path, monkeypatch, shard_tokens):
    text, out = opened(folder), tmp_path / "out"
    monkeypatch.setattr(shards, "WRITE_TOKENS", 300)
    shards.write_shards(
        out,
        train=text.train_N,
        valid=text.valid_N,
        vocab_size=256,
        text={},
        shard_tokens=shard_tokens,
    )
    assert len(list(out.glob("train-*.bin"))) == -(-len(text.train_N) // shard_tokens)
    expect_same(text, opened(out))
    assert text_digest(str(out)) == ""


def test_files_of_numpy_and_of_others_may_be_named(folder, tmp_path):
    text, out = opened(folder), tmp_path / "out"
    out.mkdir()
    half = len(text.train_N) // 2
    np.save(out / "a.npy", text.train_N[:half].astype(np.uint32))
    text.train_N[half:].astype("<u2").tofile(out / "b.bin")
    (out / "empty.bin").touch()
    text.valid_N.astype("<u2").tofile(out / "v.bin")
    header = {
        "format": shards.FORMAT,
        "dtype": "uint16",
        "vocab_size": 256,
        "train": ["a.npy", "empty.bin", "b.bin"],
        "valid": ["v.bin"],
    }
    (out / shards.HEADER).write_text(json.dumps(header))
    expect_same(text, opened(out))


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokens = np.array([70_000, 1, 2**31] * 20, dtype=np.uint32)
    shards.write_shards(tmp_path / "s", train=tokens, valid=tokens, vocab_size=2**31 + 1, text={})
    header = shards.read_header(tmp_path / "s")
    assert header["dtype"] == "uint32"
    found = shards.open_part(tmp_path / "s", header, "train")
    assert np.array_equal(found[np.arange(60)], tokens)


def test_a_run_of_the_tokens_is_cut_out_without_reading_it():
    files = shards.TokenFiles([np.arange(start, start + 5, dtype="u2") for start in (0, 5, 10)], 15)
    for start, stop in [(0, 15), (3, 12), (5, 10), (6, 6), (14, 99)]:
        cut = files[start:stop]
        assert cut[np.arange(len(cut))].tolist() == list(range(15))[start:stop]


def test_shards_are_not_written_over(spec, tmp_path):
    make_shards(spec, tmp_path / "out")
    with pytest.raises(DataError, match="holds shards already; choose another folder"):
        make_shards(spec, tmp_path / "out")


def test_shards_that_were_not_finished_are_none(spec, tmp_path):
    make_shards(spec, tmp_path / "out")
    (tmp_path / "out" / shards.HEADER).unlink()
    assert not shards.is_shards(str(tmp_path / "out"))
    with pytest.raises(DataError, match="binary files not read"):
        opened(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "expected the format 'atoll-shards-1'"),
        ({"dtype": "float64"}, "a dtype among uint16, uint32"),
        ({"vocab_size": 0}, "expected a vocab_size above 0"),
        ({"vocab_size": True}, "expected a vocab_size above 0"),
        ({"vocab_size": 300}, "of a tokenizer of 300 tokens, and the run's has 256"),
        ({"train": "train-00000.bin"}, "expected names of .bin or .npy files in 'train'"),
        ({"train": ["../train-00000.bin"]}, "expected names of .bin or .npy files in 'train'"),
        ({"train": ["/etc/passwd.bin"]}, "expected names of .bin or .npy files in 'train'"),
        ({"train": ["absent.bin"]}, "cannot read the shard"),
        ({"valid": []}, "at least 17 tokens each"),
        ({"text": 3}, "expected an object in 'text'"),
        ({"text": {"files": "many"}}, None),
    ],
)
def test_a_header_that_lies_is_refused(spec, tmp_path, changes, message):
    make_shards(spec, tmp_path / "out")
    rewrite(tmp_path / "out", **changes)
    if message is None:
        assert opened(tmp_path / "out").summary.files == 0
        return
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "out")


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"[" * 100_000])
def test_a_damaged_header_is_refused(spec, tmp_path, raw):
    make_shards(spec, tmp_path / "out")
    (tmp_path / "out" / shards.HEADER).write_bytes(raw)
    with pytest.raises(DataError, match="expected"):
        opened(tmp_path / "out")


def test_a_cut_or_foreign_file_is_refused(spec, tmp_path):
    make_shards(spec, tmp_path / "out")
    (tmp_path / "out" / "train-00000.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="cannot read the shard"):
        opened(tmp_path / "out")
    np.save(tmp_path / "out" / "f.npy", np.zeros(50))
    rewrite(tmp_path / "out", train=["f.npy"])
    with pytest.raises(DataError, match="one dimension of uint16 or uint32, got 1 of float64"):
        opened(tmp_path / "out")


def test_tokens_of_another_tokenizer_are_refused_where_they_are_drawn(spec, tmp_path):
    make_shards(spec, tmp_path / "out")
    tokens = np.full(1000, 999, dtype="<u2")
    tokens.tofile(tmp_path / "out" / "train-00000.bin")
    with pytest.raises(DataError, match="expected tokens below 256 in the shards, got 999"):
        batches(opened(tmp_path / "out"))


def test_the_command_writes_what_a_peer_reads(folder, tmp_path, capsys):
    run = tmp_path / "RUN.toml"
    run.write_text("[data]\nseq_len = 16\n")
    out = tmp_path / "out"
    assert main.main(["shards", str(run), "--data", str(folder), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["train_tokens"] == len(opened(folder).train_N)
    expect_same(opened(folder), opened(out))
    assert main.main(["shards", str(run), "--data", str(folder), "--out", str(out)]) == 2
