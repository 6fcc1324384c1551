import itertools

import pytest
import torch

from atoll.compression import parse
from atoll.optim.methods import parse as parse_method
from atoll.optim.state import fragments as cuts
from atoll.optim.state.fragments import Difference
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.pieces import FragmentError, decode_pieces, encode_pieces

LAYOUT = Layout(
    names=("embedding.w", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.2.a", "norm.w"),
    shapes=((4, 3), (5,), (2, 2), (6,), (7,), (3,)),
)


def covered(cut) -> torch.Tensor:
    """How often each value is in a fragment."""
    counts = torch.zeros(LAYOUT.numel)
    for fragment in cut:
        mine = torch.zeros(LAYOUT.numel)
        fragment.put_(mine, torch.ones(fragment.numel))
        counts += mine
    return counts


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("cut", [cuts.sequential, cuts.strided])
def test_every_value_is_in_one_fragment(cut, count):
    made = cut(LAYOUT, count)
    assert len(made) == count
    assert torch.equal(covered(made), torch.ones(LAYOUT.numel))


def test_blocks_are_taken_in_order_or_in_turns():
    first, second = cuts.sequential(LAYOUT, 2)
    assert first.spans == ((0, 27),)  # embedding, blocks 0 and 1
    assert second.spans == ((27, 37),)  # block 2 and what follows it
    even, odd = cuts.strided(LAYOUT, 2)
    assert even.spans == ((0, 21), (27, 37))
    assert odd.spans == ((21, 27),)


def test_model_without_blocks_is_one_fragment():
    layout = Layout(names=("w",), shapes=((5,),))
    assert cuts.strided(layout, 1)[0].spans == ((0, 5),)
    with pytest.raises(FragmentError, match="1 to 1"):
        cuts.strided(layout, 2)


def test_take_and_put_are_inverse():
    vector = torch.arange(LAYOUT.numel, dtype=torch.float32)
    for fragment in (*cuts.strided(LAYOUT, 2), cuts.tiled(LAYOUT)):
        back = torch.full_like(vector, -1.0)
        fragment.put_(back, fragment.take(vector))
        inside = back >= 0
        assert torch.equal(back[inside], vector[inside])
        assert int(inside.sum()) == fragment.numel


def test_pieces_of_the_whole_are_the_cells_of_the_grid():
    layout = Layout(names=("w",), shapes=((CELL + 10,),))
    assert cuts.whole(layout).pieces == ((CELL,), (10,))
    assert cuts.by_tensor(LAYOUT).pieces == LAYOUT.shapes


def test_large_tensors_are_cut_between_rows_of_tiles():
    layout = Layout(names=("w", "v", "conv"), shapes=((1_000, 300), (3 * CELL,), (70, 9, 1_000)))
    cut = cuts.by_tensor(layout)
    assert cut.pieces == (
        *((384, 300), (384, 300), (232, 300)),
        *((2 * CELL,), (CELL,)),
        *((64, 9, 1_000), (6, 9, 1_000)),
    )
    assert cut.numel == cut.slices[-1].stop == layout.numel


@pytest.mark.parametrize("spec", ["dct", "dct(k=8, bits=1)"])
def test_cosine_chunks_do_not_notice_that_a_tensor_is_cut(spec):
    layout, codec = Layout(names=("w",), shapes=((1_024, 320),)), parse(spec)
    values = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    pieces = cuts.by_tensor(layout).pieces
    cut = decode_pieces(codec, encode_pieces(codec, values, pieces), pieces)
    whole = codec.decode(codec.encode(values.view(1_024, 320)), (1_024, 320))
    torch.testing.assert_close(cut, whole.view(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("codec", "shaped"), [("int8", False), ("dct", True), ("powersgd", True)])
def test_codecs_that_look_at_shapes_get_tensors(codec, shaped):
    layout = Layout(names=("w", "v"), shapes=((30, 20), (5,)))
    (fragment,) = parse_method("diloco", codec=codec).fragments(layout)
    assert fragment.pieces == (((30, 20), (5,)) if shaped else ((605,),))


def test_tiles_lie_in_cells_that_begin_with_each_tensor():
    layout = Layout(names=("w", "v"), shapes=((300, 256), (5,)))
    tiled = cuts.tiled(layout)
    assert tiled.pieces == ((CELL,), (300 * 256 - CELL,), (5,))


def test_tiles_are_put_in_a_row_as_by_a_table_of_places():
    shapes = ((128, 130), (5,), (70, 9, 100), (64, 64), (3, 3), (300, 256))
    layout = Layout(names=tuple("abcdef"), shapes=shapes)
    vector = torch.randn(layout.numel)
    expected = []
    for values, shape in zip(layout.split(vector), shapes, strict=True):
        matrix = values.reshape(shape[0], -1).tolist() if len(shape) > 1 else [values.tolist()]
        down, across = len(matrix) // 64 * 64, len(matrix[0]) // 64 * 64
        for row in range(0, down, 64):
            for column in range(0, across, 64):
                expected += [
                    x for line in matrix[row : row + 64] for x in line[column : column + 64]
                ]
        expected += [x for line in matrix[:down] for x in line[across:]]
        expected += [x for line in matrix[down:] for x in line]
    assert cuts.tiled(layout).take(vector).tolist() == expected


def test_a_mask_says_which_values_lie_in_some_pieces():
    layout = Layout(names=("w", "v"), shapes=((300, 256), (5,)))
    tiled = cuts.tiled(layout)
    mask = tiled.mask(torch.tensor([True, False, False]))
    inside = torch.zeros(layout.numel)
    tiled.put_(inside, torch.cat([torch.ones(CELL), torch.zeros(layout.numel - CELL)]))
    assert torch.equal(mask, inside.bool())


def test_frames_that_do_not_fit_are_refused():
    codec = parse("int8")
    values = torch.randn(20)
    frames = encode_pieces(codec, values, ((5,), (15,)))
    torch.testing.assert_close(
        decode_pieces(codec, frames, ((5,), (15,))), values, rtol=0.0, atol=0.02
    )
    with pytest.raises(FragmentError, match="2 frames"):
        decode_pieces(codec, frames[:1], ((5,), (15,)))
    with pytest.raises(FragmentError, match="piece 0"):
        decode_pieces(codec, frames, ((6,), (14,)))


def test_values_are_aligned_with_their_places_in_vectors():
    shapes = ((1_280, 130), (5,), (70, 9, 100), (64, 64), (3, 3), (300, 256), (3 * CELL,))
    layout = Layout(names=tuple(f"blocks.{i}.w" for i in range(7)), shapes=shapes)
    vector = torch.randn(layout.numel)
    for fragment in (
        cuts.tiled(layout),
        cuts.whole(layout),
        *cuts.strided(layout, 3),
    ):
        expected, got = torch.zeros_like(vector), torch.zeros_like(vector)
        values = fragment.take(vector)
        fragment.put_(expected, values)
        for run, place, out in fragment.aligned(values, vector, got):
            assert torch.equal(run, place)
            out.copy_(run)
        assert torch.equal(got, expected)
        for gap in fragment.gaps:
            got[gap] = vector[gap]
        assert torch.equal(got, vector)


def test_a_difference_is_what_is_taken_of_it():
    shapes = ((1_280, 130), (5,), (70, 9, 100), (64, 64), (3, 3), (300, 256))
    layout = Layout(names=tuple(f"blocks.{i}.w" for i in range(6)), shapes=shapes)
    a, b = torch.randn(layout.numel), torch.randn(layout.numel)
    for fragment in (
        cuts.tiled(layout),
        cuts.whole(layout),
        *cuts.strided(layout, 3),
    ):
        difference = Difference(fragment, fragment.cut(a), fragment.cut(b))
        expected = fragment.take(a - b)
        assert torch.equal(difference(), expected)
        for first, last in itertools.combinations_with_replacement(fragment.slices, 2):
            run = slice(first.start, last.stop)
            out = torch.full((run.stop - run.start,), float("nan"))
            difference.write_(run, out)
            assert torch.equal(out, expected[run])
