import math

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.compression import parse
from atoll.optim.reduction.cells import Cells, body_of, sums_of_squares
from atoll.optim.reduction.contribution import LARGE_PAGE_BYTES, Feedback, Offer
from atoll.optim.state.fragments import Difference, Fragment, tiled
from atoll.optim.state.layout import CELL, Layout
from atoll.optim.state.pieces import grid, piece_slices
from atoll.optim.state.vectors import joined_bytes

NUM_CELLS = 3
N = 2 * CELL + 1_000
CODEC = parse("int8")
CELLS = Cells.of_vector(CODEC, N)
EVERYWHERE = torch.ones(NUM_CELLS, dtype=torch.bool)


def random(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def decoded(frames) -> Tensor:
    return CELLS.decode_body(body_of(frames), members=1)


def test_residual_is_weight_times_what_the_codec_lost():
    feedback, delta_N = Feedback(N, CODEC), random(1)
    offer = feedback.offer(delta_N, 5.0)
    feedback.settle(offer, EVERYWHERE, weight=5.0)
    torch.testing.assert_close(feedback.mass_N, (delta_N - decoded(offer.frames)) * 5.0)
    assert feedback.mass_N.abs().max() > 0


def test_residual_comes_back_divided_by_the_next_weight():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    offer = feedback.offer(torch.zeros(N), 4.0)
    torch.testing.assert_close(decoded(offer.frames), random(2) / 4.0, atol=0.02, rtol=0)


def test_left_out_cells_keep_their_residual():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    offer = feedback.offer(random(3), 4.0)
    feedback.settle(offer, torch.tensor([True, False, True]), weight=4.0)
    x_N = random(3) + random(2) / 4.0
    settled = (x_N - decoded(offer.frames)) * 4.0
    middle = slice(CELL, 2 * CELL)
    assert torch.equal(feedback.mass_N[middle], random(2)[middle])
    torch.testing.assert_close(feedback.mass_N[:CELL], settled[:CELL], atol=1e-5, rtol=0)
    torch.testing.assert_close(feedback.mass_N[2 * CELL :], settled[2 * CELL :], atol=1e-5, rtol=0)


def test_an_offer_changes_nothing_until_it_is_settled():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    first, second = feedback.offer(random(3), 4.0), feedback.offer(random(3), 4.0)
    assert first.frames == second.frames
    assert torch.equal(feedback.mass_N, random(2))


@pytest.mark.parametrize(
    ("included", "weight"), [((True, True, True), 4.0), ((True, False, True), 2.0)]
)
def test_credit_between_offer_and_settlement_is_kept(included, weight):
    owed, settled = Feedback(N, CODEC), Feedback(N, CODEC)
    part, lost = slice(CELL, 2 * CELL + 500), random(7)[CELL : 2 * CELL + 500]
    for feedback in (owed, settled):
        feedback.mass_N.copy_(random(2))
        offer = feedback.offer(random(3), 4.0)
        if feedback is owed:
            feedback.owner_credit(part, lost)
        feedback.settle(offer, torch.tensor(included), weight=weight)
    settled.owner_credit(part, lost)
    torch.testing.assert_close(owed.mass_N, settled.mass_N)


def test_mass_is_conserved_over_rounds_on_both_legs():
    """sum(w delta + g_old) = W u + sum(g_new), with unequal weights and three owners."""
    peers = [Feedback(N, CODEC) for _ in range(3)]
    for round_ in range(4):
        weights = [1.0 + round_, 2.0, 5.0 - round_]
        deltas = [random(10 * round_ + i) for i in range(3)]
        before_N = sum(
            w * d.double() + p.mass_N for w, d, p in zip(weights, deltas, peers, strict=True)
        )
        update_N = reduce(peers, deltas, weights)
        after_N = sum(weights) * update_N.double() + sum(p.mass_N for p in peers)
        torch.testing.assert_close(after_N, before_N, atol=1e-4, rtol=0)


def reduce(peers, deltas, weights) -> Tensor:
    offers = [p.offer(d, w) for p, d, w in zip(peers, deltas, weights, strict=True)]
    sent = [decoded(offer.frames) for offer in offers]
    mean_N = sum(w * d for w, d in zip(weights, sent, strict=True)) / sum(weights)
    update_N = decoded(CELLS.encode(mean_N))
    for index, (peer, offer) in enumerate(zip(peers, offers, strict=True)):
        peer.settle(offer, EVERYWHERE, weight=weights[index])
        part = slice(index * CELL, min((index + 1) * CELL, N))
        peer.owner_credit(part, (mean_N[part] - update_N[part]) * sum(weights))
    return update_N


def test_mass_is_conserved_when_the_group_counts_less_than_offered():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    offer = feedback.offer(random(3), 8.0)
    feedback.settle(offer, EVERYWHERE, weight=2.0)
    total = 2.0 * decoded(offer.frames) + feedback.mass_N
    torch.testing.assert_close(total, 2.0 * random(3) + random(2), atol=1e-4, rtol=0)


def test_credit_that_comes_while_an_offer_is_under_way_is_kept():
    feedback = Feedback(N, CODEC)
    offer = feedback.offer(random(3), 2.0)
    feedback.owner_credit(slice(0, CELL), torch.full((CELL,), 3.0))
    feedback.settle(offer, EVERYWHERE, weight=2.0)
    expected = (random(3) - decoded(offer.frames)) * 2.0
    torch.testing.assert_close(feedback.mass_N[:CELL], expected[:CELL] + 3.0)


def test_weight_zero_sends_delta_alone_and_leaves_the_residual():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    offer = feedback.offer(random(3), 0.0)
    assert offer.frames == tuple(CELLS.encode(random(3)))
    feedback.settle(offer, EVERYWHERE, weight=0.0)
    assert torch.equal(feedback.mass_N, random(2))


def test_beta_zero_keeps_no_residual():
    feedback = Feedback(N, CODEC, beta=0.0)
    offer = feedback.offer(random(1), 3.0)
    feedback.settle(offer, EVERYWHERE, weight=3.0)
    feedback.owner_credit(slice(0, CELL), torch.full((CELL,), 3.0))
    assert feedback.mass_N.numel() == 0
    assert offer.frames == tuple(CELLS.encode(random(1)))


def test_beta_decays_the_residual():
    feedback = Feedback(N, CODEC, beta=0.5)
    feedback.mass_N.fill_(1.0)
    offer = feedback.offer(torch.zeros(N), 1.0)
    torch.testing.assert_close(decoded(offer.frames), torch.full((N,), 0.5), atol=1e-3, rtol=0)
    feedback.settle(offer, EVERYWHERE, weight=1.0)
    torch.testing.assert_close(feedback.mass_N, torch.zeros(N), atol=1e-3, rtol=0)


def test_frames_of_whole_cells_lie_in_one_memory_that_no_reader_changes():
    first, second, _ = Feedback(N, CODEC).offer(random(1), 1.0).frames
    assert joined_bytes([first, second]).obj is first.obj
    assert first.readonly and second.readonly


def test_squares_are_those_of_what_is_sent():
    offer = Feedback(N, CODEC).offer(random(1), 1.0)
    d_N = decoded(offer.frames).double()
    assert offer.norm == pytest.approx(float(d_N.norm()))
    assert offer.squares[2] == pytest.approx(float(d_N[2 * CELL :].square().sum()))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("numel", [2 * CELL, 7_000])
def test_sums_of_squares_are_those_in_double(size, numel):
    values = torch.cat([random(4)[:numel], random(5)[:numel] * size])
    expected = [float(half.double().square().sum()) for half in values.view(2, -1)]
    pieces = ((numel,), (numel,))
    assert sums_of_squares(values, pieces) == pytest.approx(expected, rel=1e-6, abs=0.0)


def test_batches_of_cells_are_the_cells_one_by_one():
    """The formulas of this module in plain tensors, over more cells than go at once."""
    codec, numel = parse("topk+2bit"), 20 * CELL + 500
    feedback = Feedback(numel, codec, beta=0.5)
    generator = torch.Generator().manual_seed(6)
    mass_N, delta_N = torch.randn(2, numel, generator=generator).unbind(0)
    feedback.mass_N.copy_(mass_N)
    offer = feedback.offer(delta_N, 3.0)
    x_N = torch.add(delta_N, mass_N, alpha=0.5 / 3.0)
    frames = [codec.encode(x_C) for x_C in torch.split(x_N, CELL)]
    assert offer.frames == tuple(frames)
    sent = [codec.decode(f, x.shape) for f, x in zip(frames, torch.split(x_N, CELL), strict=True)]
    after_N = (x_N - torch.cat(sent)) * 3.0
    assert torch.equal(offer.after_N, after_N)
    included = torch.arange(21) % 18 != 3
    feedback.settle(offer, included, weight=1.5)
    counted = included.repeat_interleave(CELL)[:numel]
    assert torch.equal(
        feedback.mass_N, torch.where(counted, torch.lerp(mass_N, after_N, 0.5), mass_N)
    )


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("size", [1.0, 1e-30])
def test_int8_in_steps_gives_the_bits_of_cells_one_by_one(size, threads):
    """Any number of threads; the squares of small values vanish in fp32."""
    codec, numel, before = parse("int8"), 20 * CELL + 500, torch.get_num_threads()
    feedback = Feedback(numel, codec, beta=0.5)
    mass_N, a_N, b_N = size * torch.randn(3, numel, generator=torch.Generator().manual_seed(6))
    feedback.mass_N.copy_(mass_N)
    fragment = Fragment(spans=((0, numel),), pieces=grid(numel))
    try:
        torch.set_num_threads(threads)
        offer = feedback.offer(Difference(fragment, a_N, b_N), 3.0)
        same = feedback.offer(a_N - b_N, 3.0)
    finally:
        torch.set_num_threads(before)
    x_N = torch.add(a_N - b_N, mass_N, alpha=0.5 / 3.0)
    cells = torch.split(x_N, CELL)
    assert offer.frames == same.frames == tuple(codec.encode(x_C) for x_C in cells)
    sent = [codec.decode(f, x.shape) for f, x in zip(offer.frames, cells, strict=True)]
    assert torch.equal(offer.after_N, (x_N - torch.cat(sent)) * 3.0)
    assert torch.equal(same.after_N, offer.after_N)
    squares = [float(d.double().square().sum()) for d in sent]
    assert offer.squares == same.squares == pytest.approx(squares, rel=1e-6, abs=0.0)
    assert torch.equal(feedback.mass_N, mass_N)


@pytest.mark.parametrize("spec", ["int8", "int4", "topk+2bit", "sign"])
def test_threads_that_share_batches_give_the_bits_of_one(spec):
    numel, before = 40 * CELL + 500, torch.get_num_threads()
    delta_N = torch.randn(numel, generator=torch.Generator().manual_seed(6))
    offers = list[Offer]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            offers.append(Feedback(numel, parse(spec)).offer(delta_N, 3.0))
    finally:
        torch.set_num_threads(before)
    alone, shared = offers
    assert (shared.frames, shared.squares) == (alone.frames, alone.squares)
    assert torch.equal(shared.after_N, alone.after_N)


def test_frames_of_int8_begin_with_a_large_page():
    numel = 40 * CELL
    frames = Feedback(numel, parse("int8")).offer(torch.ones(numel), 3.0).frames
    together = joined_bytes(frames)
    assert isinstance(together, memoryview), "they lie side by side"
    assert len(together) > LARGE_PAGE_BYTES
    assert np.frombuffer(together, np.uint8).ctypes.data % LARGE_PAGE_BYTES == 0


@pytest.mark.parametrize("spec", ["int8", "int4", "topk+2bit", "sign"])
def test_a_contribution_that_is_spent_makes_room_for_the_residual(spec):
    codec, numel = parse(spec), 20 * CELL + 500
    fragment = Fragment(spans=((0, numel),), pieces=grid(numel))
    mass_N, a_N, b_N = torch.randn(3, numel, generator=torch.Generator().manual_seed(6))
    feedback = Feedback(numel, codec, beta=0.5)
    feedback.mass_N.copy_(mass_N)
    kept = feedback.offer(Difference(fragment, a_N, b_N), 3.0)
    spent_N = b_N.clone()
    spent = feedback.offer(Difference(fragment, a_N, spent_N, spends=True), 3.0)
    assert (spent.frames, spent.squares) == (kept.frames, kept.squares)
    assert torch.equal(spent.after_N, kept.after_N)
    assert spent.after_N.data_ptr() == spent_N.data_ptr()
    assert torch.equal(feedback.mass_N, mass_N)


def test_a_contribution_in_the_order_of_tiles_is_not_overwritten():
    fragment = tiled(Layout(names=("w",), shapes=((128, 192),)))
    a_N, b_N = torch.randn(2, fragment.numel)
    before_N = b_N.clone()
    feedback = Feedback(fragment.numel, parse("int8"), pieces=fragment.pieces)
    offer = feedback.offer(Difference(fragment, a_N, b_N, spends=True), 1.0)
    assert offer.after_N is not None
    assert torch.equal(b_N, before_N)


@pytest.mark.parametrize("spec", ["topk+2bit", "topk(k=5)+fp32", "randk(scaled=False)", "sign"])
def test_pieces_of_several_lengths_are_encoded_as_each_by_itself(spec):
    pieces = ((CELL,),) * 3 + ((512,), (CELL,), (8_192,), (70, 90), (CELL,), (8_192,))
    numel = sum(math.prod(dims) for dims in pieces)
    codec = parse(spec if "randk" not in spec else "randk(scaled=False, seed=1)")
    feedback = Feedback(numel, codec, beta=0.9, pieces=pieces)
    feedback.mass_N.copy_(torch.randn(numel))
    delta_N, weight = torch.randn(numel), 8.0
    offer = feedback.offer(delta_N, weight)
    x_N = torch.add(delta_N, feedback.mass_N, alpha=0.9 / weight)
    for piece, frame, squares in zip(
        piece_slices(pieces), offer.frames, offer.squares, strict=True
    ):
        dims = (piece.stop - piece.start,)
        if "randk" not in spec:
            assert frame == codec.encode(x_N[piece])
        sent = codec.decode(frame, dims)
        assert torch.equal(offer.after_N[piece], (x_N[piece] - sent) * weight)
        assert squares == pytest.approx(float(sent.double().square().sum()), rel=1e-6)


def test_residual_stays_bounded_over_many_rounds():
    feedback, norms = Feedback(N, CODEC), []
    for seed in range(30):
        feedback.settle(feedback.offer(random(seed), 3.0), EVERYWHERE, weight=3.0)
        norms.append(float(feedback.mass_N.norm()))
    assert max(norms[10:]) < 2 * norms[0]


def test_state_dict_round_trip():
    feedback, other = Feedback(N, CODEC), Feedback(N, CODEC)
    feedback.settle(feedback.offer(random(1), 3.0), EVERYWHERE, weight=3.0)
    other.load_state_dict(feedback.state_dict())
    assert torch.equal(other.mass_N, feedback.mass_N)
    with pytest.raises(ValueError, match="residual"):
        Feedback(5, CODEC).load_state_dict(feedback.state_dict())
    feedback.reset()
    assert not feedback.mass_N.any()
    assert other.mass_N.any()


def test_feedback_with_an_unbiased_codec_is_refused():
    class Unbiased(type(CODEC)):
        mode = "unbiased"

    codec = Unbiased()
    with pytest.raises(ValueError, match="unbiased"):
        Feedback(N, codec)
    assert Feedback(N, codec, beta=0.0).beta == 0.0


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_feedback_outside_zero_and_one_is_refused(beta):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Feedback(N, CODEC, beta=beta)


def test_the_residual_outlives_its_codec():
    feedback = Feedback(N, CODEC)
    feedback.mass_N.copy_(random(2))
    feedback.offer(random(1), 4.0)  # given up
    feedback.use_codec(parse("fp32"))
    torch.testing.assert_close(feedback.mass_N, random(2))
    offer = feedback.offer(torch.zeros(N), 4.0)
    sent = Cells.of_vector(parse("fp32"), N).decode_body(body_of(offer.frames), members=1)
    torch.testing.assert_close(sent, random(2) / 4.0)
    feedback.settle(offer, EVERYWHERE, weight=4.0)
    assert feedback.mass_N.abs().max() == 0
