"""A model of 7B parameters among ranks: nothing here allocates one vector of it.

Its vectors are files of 28 GB that have no blocks on the disk, and its frames have a byte each.
"""

import itertools
import os

import pytest
import torch
from torch import distributed

from atoll.optim import in_process, methods
from atoll.optim.methods.base import Method
from atoll.optim.ranks import RankReducer, Ranks
from atoll.optim.ranks.placing import RankPlaces
from atoll.optim.ranks.ranges import ranges
from atoll.optim.ranks.ranks import MAX_HEADER_BYTES
from atoll.optim.reduction.contribution import Offer
from atoll.optim.state.layout import CELL, Layout

NUMEL = 7_000_000_000
VECTOR = Layout(names=("w",), shapes=((NUMEL,),))
MATRICES = Layout(
    names=tuple(f"blocks.{block}.w" for block in range(32)), shapes=((14_592, 14_976),) * 32
)
NUM_CELLS = -(-NUMEL // CELL)


@pytest.fixture
def ranks():
    """A peer of one rank, whose process group is real."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Ranks()
    distributed.destroy_process_group()


@pytest.fixture
def sparse_vector(tmp_path):
    path = tmp_path / "vector"
    path.touch()
    os.truncate(path, 4 * NUMEL)
    return torch.from_file(str(path), shared=True, size=NUMEL, dtype=torch.float32)


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("spec", ["diloco", "sparseloco", "streaming(count=4)", "demo"])
def test_its_fragments_are_shared_out_evenly(spec, size):
    layout = VECTOR if spec == "diloco" else MATRICES
    for fragment in methods.parse(spec).fragments(layout):
        shares = ranges(fragment, size)
        bounds = [share.values for share in shares]
        assert bounds[0].start == 0 and bounds[-1].stop == fragment.numel
        assert all(a.stop == b.start for a, b in itertools.pairwise(bounds))
        assert sum(b - a for share in shares for a, b in share.spans) == fragment.numel
        assert sum(s.pieces.stop - s.pieces.start for s in shares) == len(fragment.pieces)
        largest = max(b.stop - b.start for b in bounds)
        assert largest < 1.2 * fragment.numel / size + 64 * 14_976


def test_the_leader_cuts_its_vector_without_a_copy(ranks, sparse_vector):
    places = RankPlaces(ranks, VECTOR, methods.parse("diloco").fragments(VECTOR))
    assert places.numel == NUMEL
    places.ranges = [ranges(fragment, 8) for fragment in methods.parse("diloco").fragments(VECTOR)]
    for rank, share in enumerate(places.ranges[0]):
        own = places.cut(sparse_vector, rank)
        start = share.values.start
        assert own.data_ptr() == sparse_vector.data_ptr() + 4 * start
        assert own.numel() == share.values.stop - start


class Joined(RankReducer):
    """A reducer whose leader gathers frames as it does in a window."""

    def gathered(self, own: Offer) -> Offer:
        return self._gathered(own)


def test_frames_of_all_its_cells_are_gathered(ranks):
    method: Method = methods.parse("diloco")
    reducer = Joined(ranks, lambda: in_process(1, method).member(0))
    frames = tuple(bytes([index % 251]) * (1 + index % 3) for index in range(NUM_CELLS))
    squares = tuple(float(index) for index in range(NUM_CELLS))
    offer = Offer(weight=2.0, frames=frames, squares=squares, after_N=None)
    found = reducer.gathered(offer)
    assert found.frames == frames and found.squares == squares
    assert found.weight == 2.0 and found.after_N is None
    assert 8 * NUM_CELLS < MAX_HEADER_BYTES
