import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from atoll.peer.errors import ModelError
from atoll.peer.inference.served import BadPayload, ServedStage
from atoll.peer.training.stages import Slices
from support.live_texts import CONTEXT, VOCAB, Stages
from support.stages import staged_spec

TOKENS = [9, 200, 3, 3, 17, 255, 0, 80, 41]


def ids(tokens):
    return memoryview(np.asarray(tokens, dtype="<i4").tobytes())


def through(stages, positions, *cuts, tokens=TOKENS):
    """Logits of the newest token, through all stages, in pieces of these lengths."""
    served = [stages.served(module) for module in stages.spec.modules]
    caches = [each.caches(CONTEXT) for each in served]
    start, rows = 0, memoryview(b"")
    for length in cuts:
        rows = ids(tokens[start : start + length])
        for stage, cache, module, at in zip(
            served, caches, stages.spec.modules, positions, strict=True
        ):
            state = stages.state(module, at)
            rows = memoryview(stage.extend(state.params_N, cache, rows, length))
        start += length
    return torch.from_numpy(np.frombuffer(rows, dtype="<f4").copy())


def expected(stages, positions, tokens=TOKENS):
    with torch.no_grad():
        return stages.whole(positions)(torch.tensor([tokens]))[0, -1]


@pytest.mark.parametrize("cuts", [(9,), (8, 1), (1,) * 9, (3, 1, 4, 1)])
@pytest.mark.parametrize("kv_heads", [0, 1])
def test_new_positions_give_what_the_whole_text_does(cuts, kv_heads):
    overrides = {"dim": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": kv_heads}
    stages = Stages(staged_spec(model={"overrides": overrides | {"ffn_dim": 24}}))
    found = through(stages, (4, 4, 4), *cuts)
    torch.testing.assert_close(found, expected(stages, (4, 4, 4)), atol=1e-5, rtol=1e-5)


def test_one_stage_reads_the_positions_of_two_texts_in_turn():
    stages = Stages()
    for positions in ((4, 4, 4), (5, 4, 6), (4, 4, 4)):
        found = through(stages, positions, 5, 4)
        torch.testing.assert_close(found, expected(stages, positions), atol=1e-5, rtol=1e-5)


def test_a_served_stage_holds_no_copy_of_the_parameters():
    stages = Stages()
    stage, state = stages.served("stage-2"), stages.state("stage-2", 4)
    stage.extend(state.params_N, stage.caches(4), memoryview(bytes(stage.shape.row_bytes)), 1)
    assert list(stage._model.parameters()) == []
    here = state.params_N.untyped_storage().data_ptr()
    places = [getattr(module, name) for module, name in stage._places]
    assert {each.untyped_storage().data_ptr() for each in places} == {here}


def test_caches_take_what_was_reserved():
    stages = Stages()
    stage, params_N = stages.served("stage-2"), stages.state("stage-2", 4).params_N
    caches = stage.caches(5)
    stage.extend(params_N, caches, memoryview(bytes(5 * stage.shape.row_bytes)), 5)
    kept = [buffer for cache in caches for buffer in cache.kept.values()]
    assert sum(buffer.nbytes for buffer in kept) == stage.cache_bytes(5) > 0
    with pytest.raises(ValueError, match="expected at most 5 positions"):
        stage.extend(params_N, caches, memoryview(bytes(stage.shape.row_bytes)), 1)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    stages = Stages()
    stage, params_N = stages.served("stage-1"), stages.state("stage-1", 4).params_N
    with pytest.raises(BadPayload, match=f"ids from 0 to {VOCAB - 1}"):
        stage.extend(params_N, stage.caches(4), ids([5, wrong]), 2)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(wrong):
    stages = Stages()
    stage, params_N = stages.served("stage-2"), stages.state("stage-2", 4).params_N
    row = np.zeros(16, dtype="<f4")
    row[7] = wrong
    with pytest.raises(BadPayload, match="finite"):
        stage.extend(params_N, stage.caches(4), memoryview(row.tobytes()), 1)


def test_a_stage_that_diverged_answers_nothing():
    stages = Stages()
    stage, params_N = stages.served("stage-2"), stages.state("stage-2", 4).params_N
    with pytest.raises(ModelError, match="not finite"):
        row = memoryview(np.ones(16, dtype="<f4").tobytes())
        stage.extend(params_N * 1e38, stage.caches(4), row, 1)


class Sums(nn.Module):
    """A causal slice of somebody's own, which keeps nothing: each output is a sum so far."""

    def __init__(self, width):
        super().__init__()
        self.inside = nn.Linear(width, width)

    def forward(self, x_BTD):
        return self.inside(x_BTD).cumsum(1).tanh()


class Loss(nn.Linear):
    """A last slice that gives the loss alone."""

    def forward(self, x_BTD, targets_BT):
        return super().forward(x_BTD).logsumexp(-1).mean() + 0 * targets_BT.sum()


def own_slices(last=nn.Linear, inner=Sums):
    width = 8
    builders = [
        partial(nn.Embedding, VOCAB, width),
        partial(inner, width),
        partial(last, width, VOCAB),
    ]
    return Slices(title="own", builders=builders, vocab_size=VOCAB, seq_len=CONTEXT)


def test_a_slice_without_a_cache_is_computed_again():
    known = own_slices()
    model = known.build(range(3), seed=1)
    params_N = known.layout(range(3)).flatten(model)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS]))[0, -1]
    stage = ServedStage(model, known.num_logits)
    stage.expect_extends(params_N)
    caches = stage.caches(len(TOKENS))
    for token in TOKENS:
        found = stage.extend(params_N, caches, ids([token]), 1)
    torch.testing.assert_close(torch.from_numpy(np.frombuffer(found, "<f4").copy()), wanted)
    kept = [buffer for cache in caches for buffer in cache.kept.values()]
    assert sum(buffer.nbytes for buffer in kept) == stage.cache_bytes(len(TOKENS))


def test_a_last_slice_without_logits_is_refused_with_the_reason():
    known = own_slices(last=Loss)
    model = known.build(range(3), seed=1)
    params_N = known.layout(range(3)).flatten(model)
    stage = ServedStage(model, known.num_logits)
    with pytest.raises(ModelError, match="must return logits if it is given no targets"):
        stage.expect_extends(params_N)


class Short(Sums):
    """A slice that drops a position."""

    def extend(self, x_BTD, cache):
        return self(x_BTD)[:, 1:]

    def cache_bytes(self, rows):
        return 0


def test_an_output_of_another_shape_is_refused():
    known = own_slices(inner=Short)
    model = known.build(range(2), seed=1)
    params_N = known.layout(range(2)).flatten(model)
    stage = ServedStage(model, known.num_logits)
    with pytest.raises(ModelError, match=r"expected an output of shape \(1, 1, 8\)"):
        stage.expect_extends(params_N)
