"""What a run's spec names, opened on this machine: the parts that pipelines add."""

import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import ModelError
from atoll.peer.training.opening import (
    build_stage,
    expect_params,
    first_state,
    slices_by_stage,
    slices_of,
    stage_needs,
    stage_sizes,
)
from atoll.peer.training.permission import Allowed

VOCAB = 256


def staged(stages=3, **topology):
    return RunSpec.from_dict({"topology": {"stages": stages} | topology})


def test_first_states_of_all_stages_are_the_whole_model_once():
    spec = staged()
    known = slices_of(spec, VOCAB, Allowed())
    whole = known.build(range(len(known)), seed=spec.run.seed)
    states = [first_state(spec, Allowed(), module=module) for module in spec.modules]
    names = [name for state in states for name in state.layout.names]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert len(set(names)) == len(names)
    for module, state in zip(spec.modules, states, strict=True):
        stage = build_stage(spec, module, VOCAB, Allowed())
        assert torch.equal(state.params_N, state.layout.flatten(stage))


def test_another_size_than_was_claimed_is_refused_for_the_stage():
    spec = staged(2)
    known = slices_of(spec, VOCAB, Allowed())
    sizes = [known.layout(slices_by_stage(spec, known)[module]).numel for module in spec.modules]
    assert sizes == [params for _, params in stage_sizes(spec, known)]
    for module, size in zip(spec.modules, sizes, strict=True):
        expect_params(spec, VOCAB, size, module=module)
        with pytest.raises(ModelError, match="as was claimed"):
            expect_params(spec, VOCAB, size + 1, module=module)


@pytest.mark.parametrize("name", ["activations", "gradients"])
def test_a_codec_that_does_not_fit_the_width_is_refused_at_the_start(name):
    spec = staged(2, **{name: "subspace(k=500)"})
    with pytest.raises(ModelError, match=rf"topology\.{name}: does not fit a model of width 192"):
        first_state(spec, Allowed(), module="stage-1")


def test_patterns_cut_a_model_where_they_say():
    spec = staged([["slices.[01].*"], ["slices.2.*", "*norm.weight"]])  # norms of both, refused
    with pytest.raises(ModelError, match=r"of stage-2 match slices.1.attention_norm.weight, and"):
        first_state(spec, Allowed(), module="stage-1")
    spec = staged([["slices.[0-2].*"], ["slices.3.*"]])
    known = slices_of(spec, VOCAB, Allowed())
    assert slices_by_stage(spec, known) == {"stage-1": range(3), "stage-2": range(3, 4)}
    first, last = stage_needs(spec, known)
    assert first.cost > 2 * last.cost and first.state_bytes > 2 * last.state_bytes
    state = first_state(spec, Allowed(), module="stage-2")
    assert state.layout.names == ("slices.3.norm.weight", "slices.3.head.weight")
    expect_params(spec, VOCAB, state.layout.numel, module="stage-2")


def test_more_stages_than_slices_are_refused():
    with pytest.raises(ModelError, match="change stages"):
        first_state(staged(5), Allowed(), module="stage-1")  # nano has four slices


def test_more_fragments_than_a_stage_has_slices_are_refused():
    outer = {"method": "streaming(count=2)", "inner_steps": 20}
    spec = RunSpec.from_dict({"topology": {"stages": 3}, "outer": outer})
    told = r"streaming\(count=2\) divides.* stage-2 of 3 has 1; set count to at most the slices"
    with pytest.raises(ModelError, match=told):
        first_state(spec, Allowed(), module="stage-1")
    fewer = RunSpec.from_dict({"topology": {"stages": 2}, "outer": outer})
    assert len(slices_of(fewer, VOCAB, Allowed())) == 4
