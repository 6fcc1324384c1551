import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import SetupError
from atoll.peer.lab import baseline as module
from atoll.peer.lab.baseline import alone, baseline
from atoll.peer.training.data import load as data
from atoll.peer.training.learner import Learner
from atoll.peer.training.trainer import TrainingFailed

PLAIN = {
    "run": {"rounds": 4, "seed": 3},
    "model": {"overrides": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 24}},
    "data": {"seq_len": 16},
    "inner": {"batch_size": 4, "warmup_steps": 3, "lr": 0.01},
    "outer": {"inner_steps": 5},
}
SPEC = RunSpec.from_dict(PLAIN)


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the closed ring of a low coral island. " * 200, dtype=np.uint8)
    return data.LocalCorpus(
        train_N=text[:6000], valid_N=text[6000:], tokenizer=data.ByteTokenizer()
    )


def train(corpus, **options):
    keywords = {"peer_ids": ["a", "b"], "device": "cpu", "corpus": corpus} | options
    return baseline(SPEC, **keywords)


def test_it_sees_the_tokens_of_all_peers_in_the_steps_of_one(corpus):
    result = train(corpus)
    assert (result.peers, result.steps, result.skipped_steps) == (2, 20, 0)
    assert result.tokens == 20 * 2 * 4 * 16
    assert [p.position for p in result.history] == [1, 2, 3, 4]
    assert [p.tokens for p in result.history] == [640, 1280, 1920, 2560]
    assert result.loss == result.history[-1].loss < result.history[0].loss
    assert result.valid_loss < 5.0
    assert json.loads(json.dumps(result.to_json()))["history"][0]["position"] == 1


def test_it_is_deterministic(corpus):
    one, two = train(corpus), train(corpus)
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)


def test_its_first_step_averages_the_gradients_of_the_peers(corpus, monkeypatch):
    seen = []
    honest = Learner.gradient

    def gradient(self, batches, *, step):
        seen.append((step, [batch.clone() for batch in batches]))
        return honest(self, batches, step=step)

    monkeypatch.setattr(Learner, "gradient", gradient)
    train(corpus, rounds=1)
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4]
    for number, peer_id in enumerate(["a", "b"]):
        stream = corpus.stream(seed=3, peer_id=peer_id, batch_size=4, seq_len=16)
        assert all(torch.equal(batches[number], stream.next_batch()) for _, batches in seen)


def test_alone_is_one_peer(corpus):
    result = alone(SPEC, peer_id="a", device="cpu", corpus=corpus)
    assert (result.peers, result.steps, result.tokens) == (1, 20, 20 * 64)


def test_validation_is_measured_where_asked(corpus):
    points = []
    result = train(corpus, validate_every=3, progress=points.append)
    assert [p.valid_loss is not None for p in points] == [False, False, True, True]
    assert result.history == points
    assert result.valid_loss == points[-1].valid_loss


def test_a_run_without_an_end_needs_rounds(corpus):
    endless = RunSpec.from_dict(PLAIN | {"run": {"rounds": 0}})
    with pytest.raises(SetupError, match="a baseline needs an end"):
        baseline(endless, peer_ids=["a"], corpus=corpus, device="cpu")
    assert baseline(endless, peer_ids=["a"], corpus=corpus, device="cpu", rounds=1).steps == 5


def poison(monkeypatch, bad):
    honest = Learner.gradient

    def gradient(self, batches, *, step):
        found = honest(self, batches, step=step)
        return dataclasses.replace(found, loss=math.nan) if bad(step) else found

    monkeypatch.setattr(Learner, "gradient", gradient)


def test_bad_steps_are_skipped(corpus, monkeypatch):
    poison(monkeypatch, lambda step: step < 6)
    result = train(corpus)
    assert (result.steps, result.skipped_steps) == (14, 6)
    assert math.isnan(result.history[0].loss)
    assert math.isfinite(result.loss)


def test_nothing_but_bad_steps_is_an_error(corpus, monkeypatch):
    poison(monkeypatch, lambda step: True)
    monkeypatch.setattr(module, "MAX_SKIPS", 2)
    with pytest.raises(TrainingFailed, match="10 steps of the baseline in a row"):
        train(corpus)
