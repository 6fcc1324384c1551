import pytest
import torch

from atoll.optim import methods
from atoll.optim.ranks.ranges import ranges
from atoll.optim.state.fragments import TILE
from atoll.optim.state.layout import CELL, Layout

LAYOUT = Layout(
    names=("table", "blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b", "head"),
    shapes=((1000, 128), (256, 256), (256,), (320, 1024), (1,), (100, 70)),
)
SPECS = (
    "diloco",
    "diloco(count=2)",
    "streaming(count=2, pattern=sequential)",
    "sparseloco",
    "demo",
    "ddp(codec=powersgd(rank=2))",
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("spec", SPECS)
def test_ranges_share_out_every_value_in_both_orders(spec, ranks):
    vector_N = torch.arange(float(LAYOUT.numel))
    for fragment in methods.parse(spec).fragments(LAYOUT):
        shares = ranges(fragment, ranks)
        assert len(shares) == ranks
        own = [share.fragment(fragment, 0) for share in shares]
        parts = [
            torch.cat([vector_N[a:b] for a, b in share.spans] or [vector_N[:0]]) for share in shares
        ]
        # Each rank orders its own values; one after another they are the fragment's.
        assert torch.equal(torch.cat(parts), fragment.cut(vector_N))
        ordered = [each.take(part) for each, part in zip(own, parts, strict=True)]
        assert torch.equal(torch.cat(ordered), fragment.take(vector_N))
        assert sum((each.pieces for each in own), ()) == fragment.pieces
        assert [each.numel for each in own] == [len(part) for part in parts]


def test_ranges_are_about_equal_where_pieces_allow_it():
    (fragment,) = methods.parse("diloco").fragments(LAYOUT)
    sizes = [share.values.stop - share.values.start for share in ranges(fragment, 4)]
    assert max(sizes) - min(sizes) <= CELL


def test_a_matrix_without_a_margin_is_cut_between_rows_of_tiles():
    layout = Layout(names=("w",), shapes=((512, 1024),))
    (fragment,) = methods.parse("sparseloco").fragments(layout)
    first, second = ranges(fragment, 2)
    assert first.tensors == second.tensors == ((256, 1024),)
    assert first.tensors[0][0] % TILE == 0
