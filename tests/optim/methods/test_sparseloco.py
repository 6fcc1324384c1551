"""`sparseloco`: tiles, error feedback, the union of indices, one outer rate."""

from itertools import pairwise

import pytest
import torch

from atoll.compression import CodecError
from atoll.optim.methods import parse
from atoll.optim.state import fragments as cuts
from atoll.optim.state.layout import Layout
from support.toys import Team, flat, net


def test_all_values_of_fp32_are_dense():
    """Top-k of 100% without loss is DiLoCo without momentum."""
    sparse = Team(3, "sparseloco", 3, codec="topk(k=4096)+fp32")
    dense = Team(3, "diloco", 3, codec="fp32", lr=1.0, momentum=0.0)
    for team in (sparse, dense):
        team.run(range(12))
    torch.testing.assert_close(sparse.local(), dense.local(), rtol=1e-5, atol=1e-6)


def hand_in(team: Team, deltas) -> None:
    """One round of given pseudo-gradients."""
    from atoll.optim.reducer import Contribution

    for index, delta in enumerate(deltas):
        member = team.group.member(index)
        member.submit(Contribution(window=0, delta=delta, tokens=8, steps=1, loss=0.0))


def test_feedback_and_selection_are_the_papers():
    """e = 0.95 e + delta; the largest of a chunk are sent; what was sent leaves e."""
    team = Team(1, "sparseloco(codec=topk(k=64)+fp32)", 1, make=lambda: net(1, 128), clip_at=0)
    method = parse("sparseloco")
    layout = Layout.of(net(1, 128))
    (fragment,) = method.fragments(layout)
    residual = torch.zeros(layout.numel)
    expected = fragment.take(flat(net(1, 128)))
    for round_ in range(3):
        delta = torch.randn(layout.numel, generator=torch.Generator().manual_seed(round_))
        hand_in(team, [delta])
        residual = 0.95 * residual + delta
        sent = torch.zeros_like(residual)
        for piece in fragment.slices:
            for chunk in torch.split(torch.arange(piece.start, piece.stop), 4096):
                k = -(-64 * chunk.numel() // 4096)
                chosen = chunk[residual[chunk].abs().topk(k).indices]
                sent[chosen] = residual[chosen]
        residual = residual - sent
        expected = expected - sent
    got = fragment.take(team.group.state.params_N)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_mean_keeps_the_union_of_the_senders_indices():
    spec = "sparseloco(codec=topk(k=64)+fp32, average=all)"
    team = Team(2, spec, 1, make=lambda: net(1, 128), clip_at=0)
    numel = Layout.of(net(1, 128)).numel
    before = team.group.state.params_N.clone()
    deltas = [torch.zeros(numel), torch.zeros(numel)]
    deltas[0][5], deltas[1][6] = 1.0, 2.0
    hand_in(team, deltas)
    fragment = team.workers[0].fragments[0]
    step = fragment.take(before - team.group.state.params_N)
    torch.testing.assert_close(step[5:7], torch.tensor([0.5, 1.0]), rtol=1e-4, atol=1e-5)
    assert int((step.abs() > 1e-5).sum()) == 2


def test_mean_over_senders_counts_what_one_sent_in_full():
    spec = "sparseloco(codec=topk(k=64)+fp32)"
    team = Team(2, spec, 1, make=lambda: net(1, 128), clip_at=0)
    numel = Layout.of(net(1, 128)).numel
    fragment = team.workers[0].fragments[0]
    before = team.group.state.params_N.clone()
    chunk = torch.zeros(numel)
    chunk[:64] = torch.linspace(1.0, 2.0, 64)
    other = chunk.clone()
    other[0], other[64] = 0.0, 3.0
    hand_in(team, [chunk, other])
    step = fragment.take(before - team.group.state.params_N)
    torch.testing.assert_close(step[0], torch.tensor(1.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step[64], torch.tensor(3.0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step[1:64], chunk[1:64], rtol=1e-4, atol=1e-5)


def test_what_was_not_selected_again_comes_back_from_its_owner():
    """Both send the 64 values that they may; of their mean, over both, 64 are kept."""
    spec = "sparseloco(codec=topk(k=64)+fp32, merge=select, feedback=1.0)"
    team = Team(2, spec, 1, make=lambda: net(1, 128), clip_at=0)
    fragment = team.workers[0].fragments[0]
    numel = Layout.of(net(1, 128)).numel
    small, large = torch.zeros(numel), torch.zeros(numel)
    small[:64] = torch.linspace(1.0, 2.0, 64)
    large[64:128] = torch.linspace(3.0, 4.0, 64)
    states = [team.group.state]
    for deltas in ([small, large], [torch.zeros(numel)] * 2):
        hand_in(team, deltas)
        states.append(team.group.state)
    steps = [fragment.take(before.params_N - after.params_N) for before, after in pairwise(states)]
    torch.testing.assert_close(steps[0], large / 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(steps[1], small / 2, rtol=1e-4, atol=1e-5)


def test_who_sent_what_is_told_by_topk_only():
    with pytest.raises(CodecError, match="identifies senders"):
        Team(2, "sparseloco(codec=int8)", 1).run(range(1))


def test_a_tile_of_a_matrix_is_one_chunk():
    layout = Layout(names=("w", "v"), shapes=((130, 70), (5,)))
    tiled = cuts.tiled(layout)
    vector = torch.arange(layout.numel, dtype=torch.float32)
    values = tiled.take(vector)
    matrix = vector[: 130 * 70].view(130, 70)
    assert torch.equal(values[:4096], matrix[:64, :64].reshape(-1))
    assert torch.equal(values[4096:8192], matrix[64:128, :64].reshape(-1))
    assert torch.equal(values[-5:], vector[-5:])
    back = torch.empty_like(vector)
    tiled.put_(back, values)
    assert torch.equal(back, vector)
    assert tiled.pieces == ((9100,), (5,))


def test_a_value_and_round_costs_a_quarter_of_a_bit():
    team = Team(2, "sparseloco", 1, make=lambda: net(2, 256))
    team.run(range(1))
    values = Layout.of(net(2, 256)).numel
    bits = 8 * team.group.statistics().wire_bytes / 2 / values
    assert 0.2 < bits < 0.25
