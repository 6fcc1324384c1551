"""A state that gives way: the next one takes its memory, with the bits it would have anyway."""

import pytest
import torch

from atoll.optim.log.replay import Replay
from atoll.optim.methods import parse
from atoll.optim.state import halves
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState, StateGone

NAMES = ("embed", "layers.0.weight", "layers.1.weight", "head")
LAYOUT = Layout(names=NAMES, shapes=((300, 400), (70_000,), (64, 2_000), (1_000,)))


def state_of(replay, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params_N = torch.randn(LAYOUT.numel, generator=generator)
    memory_M = torch.empty(replay.memory_numel, dtype=replay.memory_dtype)
    halves.store_(memory_M, torch.randn(replay.memory_numel, generator=generator))
    return OuterState.genesis(LAYOUT, params_N, memory_M)


def update_of(fragment):
    return torch.randn(fragment.numel, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "spec",
    [
        "diloco",
        "diloco(count=2)",
        "diloco(codec=dct)",
        "streaming(count=2, tau=1)",
        "co2",
        "demo",
        "diloco(state=bf16)",
        "diloco(codec=dct, state=bf16)",
        "streaming(count=2, tau=1, state=bf16)",
        "co2(state=bf16)",
    ],
)
@pytest.mark.parametrize("params", [False, True])
def test_the_next_state_has_the_same_bits(spec, params):
    replay = Replay(parse(spec), LAYOUT)
    fragment = replay.fragments[0]
    pure, given = state_of(replay), state_of(replay)
    before_N = given.params_N.clone()
    expected = replay.method.apply(
        pure, update_of(fragment), fragment=fragment, lr=0.7, momentum=0.9
    )
    assert given.give_way(params=params)
    got = replay.method.apply(given, update_of(fragment), fragment=fragment, lr=0.7, momentum=0.9)
    assert got.root() == expected.root()
    assert got.position == expected.position
    if not params:  # a trainer may still read them
        assert torch.equal(given.params_N, before_N)


def test_the_next_state_lies_where_the_one_before_and_the_update_did():
    replay = Replay(parse("diloco"), LAYOUT)
    fragment, state = replay.fragments[0], state_of(replay)
    update_F = update_of(fragment)
    state.give_way(params=False)
    new = replay.method.apply(state, update_F, fragment=fragment, lr=0.7, momentum=0.9)
    assert new.memory_M.data_ptr() == state.memory_M.data_ptr()
    assert new.params_N.data_ptr() == update_F.data_ptr()


def test_a_state_that_somebody_reads_stays():
    state = state_of(Replay(parse("diloco"), LAYOUT))
    release = state.at(5).keep()  # the same values at another position
    assert not state.give_way(params=True)
    assert not state.gives_memory
    release()
    release()  # the second one counts for nothing
    assert state.give_way(params=True)


@pytest.mark.parametrize("spec", ["diloco", "diloco(count=2)", "co2", "diloco(state=bf16)"])
def test_beside_a_state_that_stays_the_next_one_has_the_same_bits(spec):
    replay = Replay(parse(spec), LAYOUT)
    fragment, state = replay.fragments[0], state_of(replay)
    expected = replay.method.apply(
        state, update_of(fragment), fragment=fragment, lr=0.7, momentum=0.9
    )
    root, release = state.root(), state.keep()
    assert not state.give_way(params=True)
    got = replay.method.apply(
        state.apart(), update_of(fragment), fragment=fragment, lr=0.7, momentum=0.9
    )
    release()
    assert (got.root(), got.position) == (expected.root(), expected.position)
    assert OuterState.genesis(LAYOUT, state.params_N, state.memory_M).root() == root


def test_a_state_that_gave_way_has_only_its_digests():
    replay = Replay(parse("diloco"), LAYOUT)
    hashed, other = state_of(replay), state_of(replay)
    root = hashed.root()
    for state in (hashed, other):
        state.give_way(params=True)
        with pytest.raises(StateGone), state.kept():
            pass
    assert hashed.root() == root
    with pytest.raises(StateGone):
        other.root()


@pytest.mark.parametrize(
    "spec", ["diloco", "diloco(count=2)", "co2", "muloco", "diloco(count=2, state=bf16)"]
)
def test_pieces_one_after_another_give_the_same_bits(spec):
    replay = Replay(parse(spec), LAYOUT)
    for fragment in replay.fragments:
        pure, given, update_F = state_of(replay), state_of(replay), update_of(fragment)
        expected = replay.method.apply(pure, update_F, fragment=fragment, lr=0.7, momentum=0.9)
        given.give_way(params=True)
        got = given
        for first in range(0, len(fragment.pieces), 2):
            stop = min(first + 2, len(fragment.pieces))
            values = slice(fragment.slices[first].start, fragment.slices[stop - 1].stop)
            part = fragment.part(first, stop)
            assert torch.equal(part.cut(pure.params_N), fragment.cut(pure.params_N)[values])
            got = replay.method.apply(given, update_F[values], fragment=part, lr=0.7, momentum=0.9)
        assert replay.method.moves_values_apart
        assert got.root() == expected.root()
