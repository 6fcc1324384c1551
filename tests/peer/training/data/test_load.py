import sys

import pytest

from atoll.peer.errors import ExtraMissing
from atoll.peer.training.data import load as data
from support.texts import make_tokenizer, opened


@pytest.fixture(scope="module")
def stdlib():
    return data.open_corpus("stdlib", seq_len=128)


def test_the_standard_library_is_split_by_file(stdlib):
    total = len(stdlib.train_N) + len(stdlib.valid_N)
    assert total > 5_000_000
    assert 0.01 < len(stdlib.valid_N) / total < 0.15
    assert b"def __init__(self" in stdlib.train_N.tobytes()


def test_a_corpus_uses_the_tokenizer_of_the_run(folder):
    name = make_tokenizer(folder.parent / "tokenizer.json")
    corpus = opened(folder, tokenizer=name)
    assert len(corpus.train_N) < len(opened(folder).train_N) / 2
    assert (corpus.train_N == 0).sum() >= 40


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("pyarrow.parquet", {"source": "a.parquet"}),
        ("tokenizers", {"source": "stdlib", "tokenizer": "t.json"}),
        ("datasets", {"source": "hf:some/name"}),
    ],
)
def test_a_missing_extra_is_said_with_its_cure(monkeypatch, tmp_path, package, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing, match=r"is not installed; install it with: pip install "):
        data.open_corpus(seq_len=16, **options)
