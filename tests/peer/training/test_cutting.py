import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.errors import ModelError
from atoll.peer.training.cutting import cut_by_patterns, cut_evenly
from atoll.peer.training.stages import MAX_SLICES

# Of a model with an embedding, three blocks of two parameters, and a head.
NAMES = [
    ["slices.0.weight"],
    *[[f"slices.{index}.norm.weight", f"slices.{index}.out.weight"] for index in (1, 2, 3)],
    ["slices.4.head.weight"],
]


# --- evenly


def all_cuts(count, runs):
    for inner in itertools.combinations(range(1, count), runs - 1):
        yield tuple(itertools.starmap(range, itertools.pairwise((0, *inner, count))))


def cost_of(cut, costs):
    sums = [sum(costs[run.start : run.stop]) for run in cut]
    return max(sums), sum(each**2 for each in sums)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_a_cut_is_complete_and_no_other_is_better(costs, data):
    runs = data.draw(st.integers(1, len(costs)))
    found = cut_evenly(costs, runs)
    assert len(found) == runs and all(found)
    assert [index for run in found for index in run] == list(range(len(costs)))
    assert cost_of(found, costs) == min(cost_of(cut, costs) for cut in all_cuts(len(costs), runs))


def test_equal_slices_are_spread_evenly():
    assert [len(run) for run in cut_evenly([7] * 9, 4)] in ([3, 2, 2, 2], [2, 2, 2, 3])


def test_a_free_slice_goes_with_its_neighbour():
    assert cut_evenly([0, 5, 5, 5, 5], 2) == (range(0, 3), range(3, 5))


def test_a_deep_model_is_cut_at_once():
    found = cut_evenly([0, *[12 * 4096**2] * (MAX_SLICES - 2), 128_256 * 4096], 64)
    assert {len(run) for run in found[1:-1]} <= {8, 9}


# --- by patterns


@pytest.mark.parametrize(
    ("stages", "lengths"),
    [
        ([["slices.0.*"], ["slices.[1-4].*"]], [1, 4]),
        ([["slices.[012].*"], ["slices.3.*", "*head*"]], [3, 2]),
        (
            [["slices.0.weight", "slices.1.*"], ["*.2.norm.*", "*.2.out.*"], ["slices.[!012].*"]],
            [2, 1, 2],
        ),
        ([[f"slices.{index}.*"] for index in range(5)], [1] * 5),
        ([["slices.0.*", "*.0.weight"], ["slices.?.*.weight"]], [1, 4]),  # two of one stage match
    ],
)
def test_patterns_cut_where_they_say(stages, lengths):
    found = cut_by_patterns(NAMES, stages)
    assert [index for run in found for index in run] == list(range(5))
    assert list(map(len, found)) == lengths


@given(data=st.data())
def test_every_cut_can_be_written_as_patterns(data):
    inner = data.draw(st.sets(st.integers(1, 4), min_size=1))
    runs = tuple(itertools.starmap(range, itertools.pairwise((0, *sorted(inner), 5))))
    stages = [[f"slices.{index}.*" for index in run] for run in runs]
    assert cut_by_patterns(NAMES, stages) == runs


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            [["slices.[0-2].*"], ["slices.4.*"]],
            "no pattern matches slices.3.norm.weight; add it to those of a stage, for example as "
            "'slices.3.*'",
        ),
        (
            [["slices.[0-2].*"], ["slices.[2-4].*"]],
            "both 'slices.[0-2].*' of stage-1 and 'slices.[2-4].*' of stage-2 match "
            "slices.2.norm.weight, and a parameter is in one stage; narrow one of them",
        ),
        (
            [["slices.[0-2].*"], ["slices.[34].*", "blocks.5.*"]],
            "'blocks.5.*' of stage-2 matches no parameter; the model's names are slices.0.weight "
            "to slices.4.head.weight; correct the pattern, or remove it",
        ),
        (
            [["slices.[01].*", "slices.2.norm.*"], ["slices.2.out.*", "slices.[34].*"]],
            "slices.2.norm.weight is in stage-1 and slices.2.out.weight in stage-2, and a slice "
            "cannot be divided; put 'slices.2.*' into one of them",
        ),
        (
            [["slices.[02].*"], ["slices.[134].*"]],
            "slices.2.norm.weight is in stage-1, behind a slice of stage-2; stages follow each "
            "other as the slices do, so put slice 2 into stage-2 or a later stage",
        ),
        ([["slices.[1-4].*"], ["slices.0.*"]], "slices.1.norm.weight is in stage-1, behind"),
        (
            [["slices.0.*"], ["slices.[1-4].*"], ["SLICES.4.*"]],
            "'SLICES.4.*' of stage-3 matches no",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(stages, told):
    with pytest.raises(ModelError, match="^topology.stages: .*" + re.escape(told)):
        cut_by_patterns(NAMES, stages)
