"""Streams, the split, and validation."""

import gc
import json

import numpy as np
import pytest
import torch

from atoll.peer.errors import DataError
from atoll.peer.training.data import corpus as corpus_module
from atoll.peer.training.data import load as data
from support.texts import opened, stream, text


def test_a_stream_resumes_exactly(folder):
    corpus = opened(folder)
    whole, before = stream(corpus), stream(corpus)
    expected = [whole.next_batch() for _ in range(6)]
    for _ in range(3):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = stream(corpus)
    after.load_state_dict(state)
    assert all(torch.equal(after.next_batch(), batch) for batch in expected[3:])


def test_peers_and_seeds_draw_different_text(folder):
    corpus = opened(folder)
    first = stream(corpus).next_batch()
    assert torch.equal(first, stream(corpus).next_batch())
    assert not torch.equal(first, stream(corpus, peer_id="bob").next_batch())
    assert not torch.equal(first, stream(corpus, seed=2).next_batch())


def test_a_stream_is_the_same_for_ever():
    corpus = data.LocalCorpus(
        train_N=np.arange(200, dtype=np.uint8),
        valid_N=np.arange(50, dtype=np.uint8),
        tokenizer=data.ByteTokenizer(),
    )
    drawn = corpus.stream(seed=0, peer_id="p", batch_size=3, seq_len=4)
    batches = [drawn.next_batch()[:, 0].tolist() for _ in range(2)]
    assert batches == [[51, 126, 10], [116, 192, 137]]


def test_batches_hold_inputs_and_targets(folder):
    batch = stream(opened(folder)).next_batch()
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64


def test_windows_reach_the_last_token():
    corpus = data.LocalCorpus(
        train_N=np.arange(10, dtype=np.uint8),
        valid_N=np.arange(10, dtype=np.uint8),
        tokenizer=data.ByteTokenizer(),
    )
    drawn = corpus.stream(seed=0, peer_id="p", batch_size=64, seq_len=7)
    assert set(drawn.next_batch()[:, 0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "state", [{}, {"kind": "documents", "documents": 1}, {"kind": "windows", "batches": "3"}]
)
def test_a_state_of_another_stream_is_refused(folder, state):
    with pytest.raises(DataError, match="expected the state of a 'windows' stream"):
        stream(opened(folder)).load_state_dict(state)


def test_validation_is_the_same_at_every_call(folder):
    first, second = (
        opened(folder, valid_fraction=0.2).validation(batches=3, batch_size=4, seq_len=16)
        for _ in range(2)
    )
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_document_is_in_both_parts(folder):
    corpus = opened(folder, valid_fraction=0.3)
    parts = [set(part.tobytes().split(b"\0")) - {b""} for part in (corpus.train_N, corpus.valid_N)]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == 60
    assert 8 <= len(parts[1]) <= 28


def test_the_split_depends_on_names_alone(folder):
    before = opened(folder, valid_fraction=0.3)
    (folder / "part0" / "0.txt").write_text("other text altogether")
    after = opened(folder, valid_fraction=0.3)
    moved = set(after.valid_N.tobytes().split(b"\0")) ^ set(before.valid_N.tobytes().split(b"\0"))
    assert len(moved) in (0, 2)


def test_one_file_gives_its_tail_to_validation(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("a" * 900 + "z" * 100)
    corpus = opened(file, valid_fraction=0.1)
    assert corpus.train_N.tobytes().startswith(b"a" * 900)
    assert set(corpus.valid_N.tobytes()) <= {ord("z"), 0}
    assert len(corpus.valid_N) == 100


def test_a_tiny_text_still_gives_a_window_to_each_part(tmp_path):
    (tmp_path / "tiny.txt").write_text("x" * 34)
    corpus = opened(tmp_path / "tiny.txt", valid_fraction=0.01)
    assert min(len(corpus.train_N), len(corpus.valid_N)) >= 17


def test_what_was_found_is_counted(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0binary")
    corpus = opened(folder)
    found = corpus.summary
    assert found.files == 60
    assert found.num_bytes == sum(len(text(number)) for number in range(60))
    assert found.train_tokens + found.valid_tokens == found.num_bytes + 60  # one end each
    assert found.not_read == "1 binary file not read (picture.png)"


@pytest.mark.parametrize("content", ["", "too short"])
def test_too_little_text_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(
        DataError, match=r"expected at least 34 tokens of text .*, got \d+; add text"
    ):
        opened(tmp_path)


def test_a_large_corpus_rests_on_disk(folder, monkeypatch):
    expected = opened(folder)
    monkeypatch.setattr(corpus_module, "SPOOL_BYTES", 1000)
    corpus = opened(folder)
    gc.collect()
    assert isinstance(corpus.train_N, np.memmap)
    assert np.array_equal(corpus.train_N, expected.train_N)
    assert torch.equal(stream(corpus).next_batch(), stream(expected).next_batch())
