"""Bodies of updates: one frame a cell, means and gathered ones, and what is refused."""

import struct
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from atoll.compression import CodecError, parse
from atoll.optim.log.replay import Replay
from atoll.optim.methods import parse as parse_method
from atoll.optim.reduction.cells import (
    LENGTH,
    TERM,
    Cells,
    Sent,
    Term,
    UpdateError,
    body_of,
    pack,
    unpack,
)
from atoll.optim.state.fragments import Fragment, by_tensor, tiled, whole
from atoll.optim.state.layout import CELL, Layout

N = 2 * CELL + 700
CODEC = parse("int8")
CELLS = Cells.of_vector(CODEC, N)
MIXED = Layout(names=("w", "b", "conv"), shapes=((130, 70), (5,), (3, 4, 2)))


def vector(seed: int = 3, numel: int = N) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def frames() -> list[bytes]:
    return CELLS.encode(vector())


def gathering(codec: str, fragment: Fragment, *, by_senders: bool = False) -> Cells:
    return Cells(codec=parse(codec), fragment=fragment, gathers=True, by_senders=by_senders)


def terms_of(cells: Cells, index: int, *members: tuple[float, float, Tensor]) -> list[Term]:
    return [
        Term(share=share, weight=weight, frame=cells.encode(values_F)[index])
        for share, weight, values_F in members
    ]


def decoded(cells: Cells, index: int, frame: bytes) -> Tensor:
    out = torch.empty(cells.fragment.slices[index].stop - cells.fragment.slices[index].start)
    cells.decode_reduced(index, frame, out)
    return out


def test_a_body_of_an_exact_codec_has_the_longest_length(frames):
    assert [len(frame) for frame in frames] == [
        CODEC.wire_bytes(CELL),
        CODEC.wire_bytes(CELL),
        CODEC.wire_bytes(700),
    ]
    assert len(body_of(frames)) == CELLS.max_body_bytes(members=9)
    assert CELLS.max_body_bytes(2, 1, 2) == LENGTH.size + CODEC.wire_bytes(CELL)
    sums = CELLS.max_body_bytes(2, 0, 1) + CELLS.max_body_bytes(2, 1, 3)
    assert sums == CELLS.max_body_bytes(2)


def test_a_body_decodes_to_what_its_frames_do(frames):
    update_F = CELLS.decode_body(body_of(frames), members=2)
    by_frame = [CELLS.decode_sent(index, frame) for index, frame in enumerate(frames)]
    assert torch.equal(update_F, torch.cat(by_frame))
    assert update_F.dtype == torch.float32
    torch.testing.assert_close(update_F, vector(), atol=0.03, rtol=0)


@pytest.mark.parametrize("spec", ["zstd(int8)", "zstd(fp16)"])
def test_frames_may_be_shorter_than_the_longest(spec):
    cells, values_F = Cells.of_vector(parse(spec), N), vector().round()
    body = body_of(cells.encode(values_F))
    assert len(body) < cells.max_body_bytes(1)
    plain = parse(spec).codec
    whole_F = torch.cat([plain.decode(plain.encode(c), c.numel()) for c in values_F.split(CELL)])
    assert torch.equal(cells.decode_body(body, 1), whole_F)


@pytest.mark.parametrize("cut", [0, 1, 3, 100, 65_600])
def test_a_body_that_ends_early_is_refused(frames, cut):
    with pytest.raises(UpdateError, match="expected"):
        CELLS.decode_body(body_of(frames)[:cut], 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_body_without_its_last_cells_is_refused(frames, count):
    with pytest.raises(UpdateError, match=f"expected 3 chunks, got {count}"):
        CELLS.decode_body(body_of(frames[:count]), 1)


def test_a_body_that_is_too_long_is_refused_before_it_is_read(frames):
    with pytest.raises(UpdateError, match="expected a body of at most"):
        CELLS.decode_body(body_of(frames) + b"x", 1)


def test_a_cell_more_than_there_are_is_refused(frames):
    with pytest.raises(UpdateError, match="at most 3 chunks"):
        unpack(memoryview(body_of(frames) + pack(b"")), [1 << 20] * 3)


def test_a_length_beyond_the_limit_is_refused():
    with pytest.raises(UpdateError, match="at most 10 bytes"):
        unpack(memoryview(pack(b"12345678901")), [10])
    with pytest.raises(UpdateError, match="got one of 4294967295"):
        unpack(memoryview(struct.pack("<I", 2**32 - 1) + b"1"), [1 << 40])


def test_a_flipped_bit_names_its_cell(frames):
    broken = bytearray(frames[1])
    broken[len(broken) // 2] ^= 1
    with pytest.raises(UpdateError, match="chunk 1: "):
        CELLS.decode_body(body_of([frames[0], broken, frames[2]]), 1)


def test_frames_in_another_order_are_refused(frames):
    with pytest.raises(UpdateError):
        CELLS.decode_body(body_of(frames[::-1]), 1)


def test_a_codec_that_decodes_to_infinity_is_refused(frames):
    class Lying(type(CODEC)):
        def decode(self, data, shape, *, device="cpu", out=None):
            return out.fill_(float("inf"))

    with pytest.raises(UpdateError, match="finite"):
        Cells.of_vector(Lying(), N).decode_body(body_of(frames), 1)


def test_a_codec_that_remembers_is_refused():
    with pytest.raises(CodecError, match="stand alone"):
        Cells.of_vector(type("Other", (type(CODEC),), {"stateful": True})(), N)


def test_gathered_frames_decode_to_the_weighted_mean():
    cells = gathering("topk(k=16)+2bit", tiled(MIXED))
    mine, other = vector(1, MIXED.numel), vector(2, MIXED.numel)
    frame = cells.encode_terms(terms_of(cells, 0, (1.0, 2.0, mine), (3.0, 3.0, other)))
    sent = [cells.decode_sent(0, cells.encode(values_F)[0]) for values_F in (mine, other)]
    torch.testing.assert_close(decoded(cells, 0, frame), (sent[0] + 3 * sent[1]) / 5)
    assert len(frame) <= cells.max_reduced_bytes(0, members=2)


@pytest.mark.parametrize("codec", ["dct(k=16)", "dct(k=8, bits=1)"])
@pytest.mark.parametrize("shares", [(1.0, 3.0), (1.0, 0.5)])
def test_cells_gathered_at_once_are_those_of_one_at_a_time(codec, shares):
    cells = gathering(codec, by_tensor(MIXED))
    mine, other = vector(1, MIXED.numel), vector(2, MIXED.numel)
    members = [(shares[0], 1.0, mine), (shares[1], 3.0, other)]
    frames = [cells.encode_terms(terms_of(cells, index, *members)) for index in range(len(cells))]
    fewer = [*frames[:-1], cells.encode_terms(terms_of(cells, len(cells) - 1, *members[:1]))]
    for sent in (frames, fewer):  # all cells with the same members, and one without
        together = torch.empty(MIXED.numel)
        cells.decode_reduced_all(0, sent, together)
        one_by_one = [decoded(cells, index, frame) for index, frame in enumerate(sent)]
        assert torch.equal(together, torch.cat(one_by_one))


def test_a_value_counts_in_full_where_the_senders_divide():
    cells = gathering("topk(k=16)", tiled(MIXED), by_senders=True)
    mine, other = vector(1, MIXED.numel), vector(2, MIXED.numel)
    frame = cells.encode_terms(terms_of(cells, 0, (2.0, 2.0, mine), (3.0, 3.0, other)))
    first, second = (cells.decode_sent(0, cells.encode(v)[0]) for v in (mine, other))
    got = decoded(cells, 0, frame)
    alone = (first != 0) & (second == 0)
    both = (first != 0) & (second != 0)
    assert bool(alone.any())
    torch.testing.assert_close(got[alone], first[alone])
    torch.testing.assert_close(got[both], ((2 * first + 3 * second) / 5)[both])
    assert not got[(first == 0) & (second == 0)].any()


def test_a_cell_that_nobody_sent_is_zero():
    cells = gathering("topk(k=16)", tiled(MIXED))
    assert not decoded(cells, 0, cells.encode_terms([])).any()


def test_who_sent_a_value_is_told_by_sparse_codecs_only():
    with pytest.raises(CodecError, match="identifies senders, got int8"):
        gathering("int8", whole(MIXED), by_senders=True)


def a_gathered_frame() -> tuple[Cells, bytes]:
    cells = gathering("dct(k=4)", by_tensor(MIXED))
    return cells, cells.encode_terms(terms_of(cells, 2, (1.0, 1.0, vector(1, MIXED.numel))))


@pytest.mark.parametrize(
    "numbers", [(-1, 1), (1, 0), (float("nan"), 1), (1, float("inf")), (3e38, 1e-45)]
)
def test_a_share_or_weight_that_is_none_is_refused(numbers):
    cells, frame = a_gathered_frame()
    bad = TERM.pack(*numbers, len(frame) - TERM.size) + frame[TERM.size :]
    with pytest.raises(CodecError, match="expected a weight above 0"):
        decoded(cells, 2, bad)


@pytest.mark.parametrize("length", [2**32 - 1, 1, 0])
def test_a_term_of_another_length_is_refused(length):
    cells, frame = a_gathered_frame()
    with pytest.raises(CodecError):
        decoded(cells, 2, TERM.pack(1.0, 1.0, length) + frame[TERM.size :])


def test_a_term_longer_than_any_member_sends_is_refused_undecoded():
    cells, _ = a_gathered_frame()
    length = cells.max_sent_bytes(2) + 1
    with pytest.raises(CodecError, match=f"at most {length - 1} bytes of a member, got {length}"):
        decoded(cells, 2, TERM.pack(1.0, 1.0, length) + bytes(length))


def test_a_sum_that_overflows_is_refused():
    cells = gathering("topk(k=16)", tiled(MIXED), by_senders=True)
    huge = torch.full((MIXED.numel,), 3e38)
    frame = cells.encode_terms(terms_of(cells, 0, (1.0, 1.0, huge), (1.0, 1.0, huge)))
    with pytest.raises(CodecError, match="finite"):
        decoded(cells, 0, frame)


def test_fragments_take_turns_and_the_log_holds_no_gossip():
    layers = Layout(names=tuple(f"blocks.{i}.w" for i in range(4)), shapes=((10,),) * 4)
    replay = Replay(parse_method("streaming(count=3)"), layers)
    assert [replay.fragment_at(p) for p in range(6)] == [1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="in the log"):
        Replay(parse_method("noloco"), layers)


@pytest.mark.parametrize("spec", ["topk+2bit", "int8", "zstd(int8)", "mixed(w=topk, *=int8)"])
@pytest.mark.parametrize("cut", [(0, 24), (3, 4), (5, 22), (20, 24)])
def test_consecutive_cells_are_the_cells_one_by_one(spec, cut):
    """More of them than go at once, with shorter ones between them."""
    layout = Layout(names=("w", "b", "v"), shapes=((1_280, 1_024), (5,), (3 * CELL,)))
    cells = Cells(codec=parse(spec), fragment=tiled(layout))
    first, stop = cut
    values, mean = vector(1, cells.numel), vector(2, cells.numel)[cells.values(first, stop)]
    sent = cells.encode(values)[first:stop]
    one_by_one = [cells.decode_sent(i, frame) for i, frame in enumerate(sent, first)]
    runs = [(run, dense(cells, run, found)) for run, found in cells.decode_runs(first, sent)]
    assert [index for run, _ in runs for index in run] == list(range(first, stop))
    assert torch.equal(torch.cat([values for _, values in runs]), torch.cat(one_by_one))
    pieces = torch.split(mean.clone(), [piece.numel() for piece in one_by_one])
    average, lost = mean.clone(), torch.empty_like(mean)
    reduced = cells.encode_mean_all(first, stop, average, lost)
    assert reduced == [cells.encode_mean(i, piece) for i, piece in enumerate(pieces, first)]
    out = torch.empty_like(mean)
    cells.decode_reduced_all(first, reduced, out)
    expected = torch.cat([decoded(cells, i, frame) for i, frame in enumerate(reduced, first)])
    assert torch.equal(out, expected)
    assert torch.equal(average, expected)
    assert torch.equal(lost, mean - expected)


def dense(cells: Cells, run: range, sent: Sent) -> torch.Tensor:
    values = cells.values(run.start, run.stop)
    out = torch.empty(values.stop - values.start)
    sent.put_(out)
    return out


def test_consecutive_cells_of_gathered_frames_are_decoded():
    layout = Layout(names=("w",), shapes=((256, 1_024),))
    cells = gathering("topk+2bit", tiled(layout))
    reduced = [
        cells.encode_terms(terms_of(cells, i, (2.0, 2.0, vector(1, 4 * CELL)))) for i in range(4)
    ]
    out = torch.empty(2 * CELL)
    cells.decode_reduced_all(1, reduced[1:3], out)
    assert torch.equal(out, torch.cat([decoded(cells, i, reduced[i]) for i in (1, 2)]))


def test_factors_are_never_taken_together():
    layout = Layout(names=("a", "b"), shapes=((60, 40), (60, 40)))
    replay = Replay(parse_method("diloco(codec=powersgd(rank=2))"), layout)
    cells = replay.cells_at(0)
    for own in (cells, cells.first):
        assert [run for run, _ in own.runs(0, 2)] == [range(1), range(1, 2)]


@pytest.mark.parametrize("cells", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sparse_codec_that_decodes_to_no_number_is_refused(bad, cells):
    honest = parse("topk(k=16)+2bit")

    class Lying(type(honest)):
        def sparse_rows(self, frames, numel):
            return replace(found := super().sparse_rows(frames, numel), values=found.values * bad)

    lying = Lying(**{f.name: getattr(honest, f.name) for f in fields(honest) if f.init})
    numel = cells * CELL
    sent = Cells.of_vector(honest, numel).encode(vector(1, numel))
    lied = Cells.of_vector(lying, numel)
    with pytest.raises(CodecError, match="finite"):
        lied.decode_scattered(0, sent)
    with pytest.raises(CodecError, match="finite"):
        lied.decode_reduced_all(0, sent, torch.empty(numel))
