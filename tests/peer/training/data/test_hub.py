"""Data sets of Hugging Face, streamed."""

import contextlib
import json

import pytest
import torch

from atoll.peer.errors import DataError
from atoll.peer.training.data import load as data
from atoll.peer.training.data.prefetch import Prefetched
from support.texts import as_text, opened, stream, text


def test_a_streamed_data_set_resumes_exactly(hub):
    corpus = opened(hub)
    whole, before = stream(corpus), stream(corpus)
    expected = [whole.next_batch() for _ in range(40)]
    for _ in range(25):
        before.next_batch()
    state = json.loads(json.dumps(before.state_dict()))
    after = stream(opened(hub))
    after.load_state_dict(state)
    assert all(torch.equal(after.next_batch(), batch) for batch in expected[25:])


def test_a_streamed_data_set_is_drawn_ahead_in_the_same_order(hub):
    plain = stream(opened(hub))
    expected = [plain.next_batch() for _ in range(60)]  # more than one pass
    with contextlib.closing(Prefetched(stream(opened(hub)))) as ahead:
        assert all(torch.equal(ahead.next_batch(), batch) for batch in expected[:25])
        state = json.loads(json.dumps(ahead.state_dict()))
    with contextlib.closing(Prefetched(stream(opened(hub)))) as ahead:
        ahead.next_batch()
        ahead.load_state_dict(state)
        assert all(torch.equal(ahead.next_batch(), batch) for batch in expected[25:])


def test_a_streamed_data_set_starts_again_at_its_end(hub):
    drawn = stream(opened(hub))
    drawn.next_batch()
    passes = []
    for _ in range(900):
        drawn.next_batch()
        passes.append(drawn.state_dict()["documents"]["pass"])
    assert passes == sorted(passes)
    assert passes[-1] - passes[0] in (1, 2)


def test_peers_start_at_documents_of_their_own(hub):
    corpus = opened(hub)
    firsts = {as_text(stream(corpus, peer_id=f"p{i}").next_batch())[0] for i in range(12)}
    assert len(firsts) > 6


def test_a_streamed_data_set_without_training_documents_is_refused(hub):
    with pytest.raises(DataError, match="holds no training documents"):
        stream(opened(hub, valid_fraction=1.0)).next_batch()


def test_validation_of_a_streamed_data_set_is_never_trained_on(hub):
    corpus = opened(hub, valid_fraction=0.3)
    batches = corpus.validation(batches=2, batch_size=3, seq_len=16)
    again = opened(hub, valid_fraction=0.3).validation(batches=2, batch_size=3, seq_len=16)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    drawn = stream(corpus)
    trained = "".join("".join(as_text(drawn.next_batch())) for _ in range(400))
    held = [text(n) for n in range(330) if data.goes_to_validation(text(n), 0.3)]
    assert held
    assert not any(f"{document}\0" in trained for document in held)


def test_a_streamed_data_set_without_the_field_is_refused(hub):
    with pytest.raises(DataError, match="expected text in the field 'body', got fields text"):
        stream(opened(hub, text_field="body")).next_batch()


def test_a_data_set_that_cannot_be_opened_is_named(hub):
    with pytest.raises(DataError, match="cannot open the data set '/no/such/set'"):
        opened("hf:/no/such/set")
