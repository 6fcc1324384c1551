"""Small texts on disk, and what a run draws from them."""

import json

import pytest

from atoll.peer.training.data import load as data

WORDS = ["the sea", "a low island", "closed ring", "of coral", "round a lagoon"]


def text(number, sentences=20):
    return ". ".join(WORDS[(number + i) % 5] + f" {number}" for i in range(sentences))


def opened(source, **options):
    return data.open_corpus(str(source), **{"seq_len": 16} | options)


def stream(corpus, peer_id="alice", seed=1):
    return corpus.stream(seed=seed, peer_id=peer_id, batch_size=4, seq_len=16)


def as_text(batch):
    return [bytes(row.tolist()).decode() for row in batch]


def write_jsonl(path, field="text"):
    path.write_text("\n".join(json.dumps({field: text(i), "id": i}) for i in range(40)) + "\n\n")
    return path


def make_tokenizer(path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(i) for i in range(30)], trainer)
    tokenizer.save(str(path))
    return str(path)
