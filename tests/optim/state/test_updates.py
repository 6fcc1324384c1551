"""Updates that are kept as what was sent: the same bits as with all zeros written out."""

import pytest
import torch

from atoll.compression import parse
from atoll.compression.sparse import Sparse
from atoll.optim import methods
from atoll.optim.log.replay import cells_of
from atoll.optim.reduction.cells import Cells, UpdateError, body_of
from atoll.optim.reduction.sparse_mean import SparseMean
from atoll.optim.state import fragments as cuts
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState, StateError
from atoll.optim.state.outer_step import descend
from atoll.optim.state.updates import dense, joined, numel_of

SHAPES = ((640, 1_100), (512,), (70, 9, 100), (64, 64), (3, 3), (1_300, 256), (512,))
LAYOUT = Layout(names=tuple(f"blocks.{i}.w" for i in range(7)), shapes=SHAPES)
SPARSE = methods.parse("sparseloco(merge=select)")
TILED = cuts.tiled(LAYOUT)
CELLS = cells_of(SPARSE, TILED)


def vector(seed, numel=LAYOUT.numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def some_of(numel, seed=0):
    """A twentieth of all values."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.nonzero(torch.rand(numel, generator=generator) < 0.05).view(-1)
    return Sparse(indices=indices, values=vector(seed + 1, len(indices)), shape=(numel,))


@pytest.fixture
def torch_has_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_has_two_threads")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("signed", [False, True])
def test_descent_has_the_bits_of_all_values(decay, signed):
    layouts = [TILED, cuts.whole(LAYOUT), *cuts.strided(LAYOUT, 3)]
    state = OuterState.genesis(LAYOUT, vector(3))
    for fragment in layouts:
        update = some_of(fragment.numel)
        options = {"lr": 0.7, "decay": decay, "signed": signed, "fragment": fragment}
        got, expected = (descend(state, u, **options) for u in (update, dense(update)))
        assert torch.equal(got.params_N, expected.params_N)
        assert not torch.equal(got.params_N, state.params_N)


def test_descent_refuses_an_update_of_another_length():
    state = OuterState.genesis(LAYOUT, vector(3))
    with pytest.raises(StateError, match="expected an fp32 update"):
        descend(state, some_of(LAYOUT.numel - 1), lr=1.0)


def test_a_method_that_takes_all_values_gets_them():
    method = methods.parse("diloco(codec=topk+2bit)")
    state = method.genesis(LAYOUT, vector(3))
    (fragment,) = method.fragments(LAYOUT)
    update = some_of(fragment.numel)
    turn = {"fragment": fragment, "lr": 0.7, "momentum": 0.9}
    got, expected = (
        method.apply_sparse(state, update, **turn),
        method.apply(state, dense(update), **turn),
    )
    assert torch.equal(got.params_N, expected.params_N)
    assert torch.equal(got.memory_M, expected.memory_M)


def test_updates_of_parts_are_joined():
    parts = [some_of(numel, seed) for seed, numel in enumerate((100, 1, 5_000))]
    whole = joined(parts)
    assert isinstance(whole, Sparse)
    assert numel_of(whole) == 5_101
    assert torch.equal(dense(whole), torch.cat([dense(part) for part in parts]))
    mixed = joined([parts[0], dense(parts[1]), parts[2]])
    assert torch.equal(mixed, dense(whole))


def test_a_body_is_decoded_to_what_was_sent():
    frames = CELLS.encode(vector(1))
    update = CELLS.decode_body(body_of(frames), 1)
    assert isinstance(update, Sparse)
    assert bool((update.indices.diff() > 0).all())
    by_cell = [CELLS.decode_sent(index, frame) for index, frame in enumerate(frames)]
    assert torch.equal(dense(update), torch.cat(by_cell))


def test_a_damaged_cell_of_a_sparse_body_is_named():
    frames = CELLS.encode(vector(1))
    broken = bytearray(frames[2])
    broken[-1] ^= 1
    frames[2] = bytes(broken)
    with pytest.raises(UpdateError, match="chunk 2: "):
        CELLS.decode_body(body_of(frames), 1)


def mean_of(sums, weight_of):
    """Frames, values and losses by the formulas, cell by cell."""
    frames, values, lost = [], [], []
    for index, cell in enumerate(CELLS.fragment.slices):
        weight = weight_of(index)
        mean = sums[cell] / weight if weight else sums[cell]
        frames.append(CELLS.encode_mean(index, mean))
        values.append(CELLS.decode_sent(index, frames[-1]))
        lost.append((mean - values[-1]) * weight if weight else mean - values[-1])
    return frames, torch.cat(values), torch.cat(lost)


@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_sparse_mean_has_the_bits_of_the_dense_one(step):
    """Three members, of whom one sends the first cells only, and one a share of its weight."""
    count, shares, weights = len(CELLS), (2.0, 0.5, 4.0), (2.0, 1.0, 4.0)
    sent_of = [CELLS.encode(vector(seed)) for seed in range(3)]
    prefix = [count, count, 5]
    sums = torch.zeros(CELLS.numel)
    for frames, share, cells in zip(sent_of, shares, prefix, strict=True):
        for index in range(cells):
            sums[CELLS.fragment.slices[index]] += CELLS.decode_sent(index, frames[index]) * share

    def weight_of(index):
        return sum(w for w, cells in zip(weights, prefix, strict=True) if index < cells)

    mean = SparseMean(CELLS, 0, count)
    for member in (2, 0, 1):
        frames = sent_of[member][: prefix[member]]
        for first in range(0, len(frames), 3):
            for run, sent in CELLS.decode_runs(first, frames[first : first + 3]):
                mean.add(member, run.start, sent, shares[member])
    got = []
    for first in range(0, count, step):
        cells = range(first, min(count, first + step))
        runs = [(range(i, i + 1), weight_of(i)) for i in cells]
        got += mean.encode(runs)
    frames, values, lost = mean_of(sums, weight_of)
    assert got == frames
    assert torch.equal(dense(mean.decoded), values)
    torch.testing.assert_close(dense(mean.lost), lost)


def test_a_part_in_the_middle_counts_from_its_own_first_value():
    start, stop = 4, 9
    frames = CELLS.encode(vector(1))[start:stop]
    mean = SparseMean(CELLS, start, stop)
    for run, sent in CELLS.decode_runs(start, frames):
        mean.add(0, run.start - start, sent, 3.0)
    mean.encode([(range(stop - start), 3.0)])
    values = CELLS.values(start, stop)
    assert numel_of(mean.decoded) == numel_of(mean.lost) == values.stop - values.start
    sent = [CELLS.decode_sent(index, frame) for index, frame in enumerate(frames, start)]
    kept = dense(mean.decoded) != 0
    torch.testing.assert_close(dense(mean.decoded)[kept], torch.cat(sent)[kept], rtol=0.2, atol=0)


def test_cells_of_which_nothing_came_are_zero():
    mean = SparseMean(CELLS, 0, 3)
    mean.encode([(range(3), 0.0)])
    assert not dense(mean.decoded).any()
    assert not dense(mean.lost).any()


@pytest.mark.parametrize("spec", ["int8", "sign", "dct"])
def test_other_codecs_have_all_values(spec):
    assert not Cells.of_vector(parse(spec), 1_000).scatters
