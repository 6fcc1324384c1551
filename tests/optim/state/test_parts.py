import itertools

import pytest
import torch

from atoll.optim.state.layout import LayoutError
from atoll.optim.state.parts import TensorPart, as_whole, copy_common_, mapped, parts_of


def cut(whole, *owners):
    """TensorParts of a vector, given the owner of each value."""
    parts = []
    for owner in sorted(set(owners)):
        places = [place for place, each in enumerate(owners) if each == owner]
        runs = tuple((place, place + 1) for place in places)
        parts.append(TensorPart(values=whole[places], runs=runs, shape=tuple(whole.shape)))
    return parts


def test_any_parts_make_the_whole_and_any_other_cut_of_it():
    whole = torch.arange(4.0) + 1
    for owners in itertools.product(range(3), repeat=4):
        parts = cut(whole, *owners)
        assert torch.equal(as_whole(parts), whole)
        target = torch.zeros(3)
        for part in parts:
            copy_common_(target, [(2, 4), (0, 1)], part)
        assert target.tolist() == [3.0, 4.0, 1.0]


def test_a_shape_of_several_dimensions_comes_back():
    whole = torch.arange(6).view(2, 3)
    halves = [
        TensorPart(values=whole.flatten()[a:b], runs=((a, b),), shape=(2, 3))
        for a, b in [(2, 6), (0, 2)]
    ]
    assert torch.equal(as_whole(halves), whole)


@pytest.mark.parametrize(
    "change",
    [
        {"runs": ((0, 1),)},
        {"runs": ((0, 3),)},
        {"shape": (5,)},
        {"values": torch.zeros(2).double()},
    ],
    ids=["a hole", "twice", "another tensor", "another type"],
)
def test_parts_of_another_state_are_refused(change):
    first, second = cut(torch.ones(4), 0, 0, 1, 1)
    with pytest.raises(LayoutError, match="parts of others"):
        as_whole([TensorPart(**{**vars(first), **change}), second])


def test_parts_of_a_tree_have_an_order():
    one, two = cut(torch.ones(2), 0, 1)
    tree = {"b": [one, 3], "a": ({"c": two},)}
    assert parts_of(tree) == [one, two]
    assert mapped(tree, lambda part: part.runs) == {"b": [((0, 1),), 3], "a": ({"c": ((1, 2),)},)}
