"""Fragments and delays: equal to DiLoCo where they have to be, and to a plain rule elsewhere."""

import pytest
import torch

from atoll.optim.methods import MethodError, parse
from atoll.optim.reducer import Commit
from atoll.optim.state.layout import Layout
from support.toys import Team, adamw, backward, flat, net, sgd


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_one_fragment_without_delay_and_alpha_is_diloco(codec):
    settings = {"codec": codec, "lr": 0.7, "momentum": 0.6}
    streaming = Team(3, "streaming(count=1, tau=0, alpha=0)", 3, **settings)
    diloco = Team(3, "diloco", 3, **settings)
    for team in (streaming, diloco):
        team.run(range(11))
    assert streaming.states() == diloco.states()
    assert all(torch.equal(streaming.local(i), diloco.local(i)) for i in range(3))


def plain_streaming(workers, fragments, steps, *, inner_steps, tau, merge, lr, mu):
    """Streaming DiLoCo on flat vectors, written from the paper's description.

    `merge` makes the new local values of the local ones, of synced and of what was sent.
    """
    models = [net() for _ in range(workers)]
    inners = [adamw(model) for model in models]
    synced = flat(models[0])
    buffers = [torch.zeros_like(synced) for _ in fragments]
    momenta = [torch.zeros_like(synced) for _ in fragments]
    travelling = {}
    offsets = [index * inner_steps // len(fragments) for index in range(len(fragments))]
    for step in range(1, steps + 1):
        for index, (model, inner) in enumerate(zip(models, inners, strict=True)):
            backward(model, 100 * (step - 1) + index)
            inner.step()
        for index, mask, sent in travelling.pop(step, []):
            u = buffers[index]
            momenta[index] = mu * momenta[index] + u
            synced = torch.where(mask, synced - lr * (u + mu * momenta[index]), synced)
            for model, submitted in zip(models, sent, strict=True):
                merged = torch.where(mask, merge(flat(model), synced, submitted), flat(model))
                torch.nn.utils.vector_to_parameters(merged, model.parameters())
        for index, mask in enumerate(fragments):
            if step >= max(offsets[index], 1) and (step - offsets[index]) % inner_steps == 0:
                sent = [flat(model) for model in models]
                deltas = torch.stack([synced - local for local in sent])
                buffers[index] = torch.where(mask, deltas.mean(0), 0.0)
                travelling.setdefault(step + tau, []).append((index, mask, sent))
    return synced, [flat(model) for model in models]


def half_of_each(local, synced, submitted):
    return 0.5 * local + 0.5 * synced


def with_what_was_trained_since(local, synced, submitted):
    return synced + (local - submitted)


@pytest.mark.parametrize(
    ("spec", "merge"),
    [
        ("streaming(count=2, tau=2, alpha=0.5, pattern=strided)", half_of_each),
        ("streaming(count=2, tau=2, alpha=0.5, pattern=sequential)", half_of_each),
        ("diloco(count=2, tau=2)", with_what_was_trained_since),
        ("diloco(tau=3)", with_what_was_trained_since),
        ("diloco(tau=6)", with_what_was_trained_since),
    ],
)
def test_fragments_and_delays_are_those_of_a_plain_implementation(spec, merge):
    method = parse(spec, codec="fp32", clip_at="0", lr=0.7, momentum=0.6)
    team = Team(3, method, 6)
    team.run(range(25))
    masks = []
    layout = Layout.of(net())
    for fragment in method.fragments(layout):
        mask = torch.zeros(layout.numel)
        fragment.put_(mask, torch.ones(fragment.numel))
        masks.append(mask.bool())
    synced, locals_ = plain_streaming(
        3, masks, 25, inner_steps=6, tau=method.tau, merge=merge, lr=0.7, mu=0.6
    )
    torch.testing.assert_close(team.workers[0].synced_N, synced, rtol=1e-4, atol=1e-5)
    for index in range(3):
        torch.testing.assert_close(team.local(index), locals_[index], rtol=1e-4, atol=1e-5)


def test_fragments_sync_at_their_own_offsets():
    team = Team(2, "streaming(count=2, tau=0)", 4)
    positions = []
    for step in range(12):
        team.run(range(step, step + 1))
        positions.append(team.workers[0].statistics().position)
    assert positions == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]


def test_peak_of_a_round_shrinks_with_the_fragments():
    whole, halves = (Team(2, f"streaming(count={n}, tau=0)", 4) for n in (1, 2))
    whole.run(range(4))
    halves.run(range(2))
    assert 0 < halves.group.statistics().wire_bytes < 0.7 * whole.group.statistics().wire_bytes


@pytest.mark.parametrize("tau", [-1, 7])
@pytest.mark.parametrize("name", ["streaming", "muloco"])
def test_delay_beyond_a_window_is_refused(name, tau):
    with pytest.raises(ValueError, match=r"tau|delay"):
        Team(1, f"{name}(tau={tau})", 6)


def test_more_fragments_than_blocks_are_refused():
    with pytest.raises(ValueError, match="1 to 2 fragments"):
        Team(1, "streaming(count=3, tau=0)", 6)


def test_options_out_of_range_are_refused():
    with pytest.raises(MethodError):
        parse("streaming(count=0)")


class OneAWait:
    """A run that is as slow as it may be: each wait decides the position that is next, no more."""

    def __init__(self, method):
        self.method, self.position, self.waits = method, 0, 0
        self.under_way = []
        self.most = 0

    def start(self, layout, params_N, settle):
        self.fragments, self.settle, self.params_N = self.method.fragments(layout), settle, params_N
        return params_N

    def submit(self, contribution):
        assert contribution.fragment not in self.under_way
        self.under_way.append(contribution.fragment)
        self.most = max(self.most, len(self.under_way))

    def wait(self):
        if self.under_way:  # else it returns at once
            self.waits += 1
            self.position += 1
            fragment = self.under_way.pop(0)
            pieces = len(self.fragments[fragment].pieces)
            self.settle(
                Commit(
                    fragment=fragment,
                    position=self.position,
                    params_N=self.params_N,
                    included=torch.ones(pieces, dtype=torch.bool),
                    members=2,
                )
            )


@pytest.mark.parametrize(("tau", "under_way"), [(1, 1), (3, 2), (5, 3), (8, 4)])
def test_a_long_delay_waits_only_for_what_is_overdue(tau, under_way):
    method = parse(f"streaming(count=4, tau={tau})")
    model, reducer = net(blocks=4), OneAWait(method)
    worker = method.worker(model, adamw(model), reducer, inner_steps=8)
    for step in range(40):
        backward(model, step)
        worker.step(tokens=8)
    assert reducer.most == under_way
    assert reducer.waits == reducer.position == worker.statistics().included
    assert reducer.position == (40 - tau) // 2


class OnOffer:
    """Decides a contribution when a test says so."""

    position = 0

    def __init__(self, method):
        self.method, self.submitted = method, []

    def start(self, layout, params_N, settle):
        self.fragments, self.settle, self.params_N = self.method.fragments(layout), settle, params_N
        return params_N

    def submit(self, contribution):
        self.submitted.append(contribution)

    def wait(self):
        pass

    def decide(self, contribution, *, included: bool):
        """Plain descent by it, or nothing."""
        self.position += 1
        fragment, params_N = self.fragments[contribution.fragment], self.params_N.clone()
        if included:
            fragment.put_cut_(params_N, fragment.cut(params_N) - contribution.delta_N)
        everywhere = torch.ones(len(fragment.pieces), dtype=torch.bool)
        self.settle(
            Commit(
                fragment=contribution.fragment,
                position=self.position,
                params_N=params_N,
                included=everywhere if included else None,
                members=1,
            )
        )


@pytest.mark.parametrize("included", [True, False])
def test_work_under_way_counts_once_though_later_steps_are_dropped(included):
    """One fragment travels while the window of the other ends in NaN."""
    method = parse("diloco(count=2, tau=6, codec=fp32)")
    model, reducer = net(), OnOffer(method)
    worker = method.worker(model, sgd(model), reducer, inner_steps=6)
    for step in range(6):
        backward(model, step)
        if step == 5:
            next(model.parameters()).grad.fill_(float("nan"))
        worker.step(tokens=8)
    (sound, dropped), fragment = reducer.submitted, reducer.fragments[1]
    assert (sound.fragment, sound.tokens, dropped.tokens) == (1, 24, 0)
    reducer.decide(sound, included=included)
    model.zero_grad()
    for _ in range(3):
        worker.advance(tokens=0)
    drift = fragment.cut(worker.synced_N) - fragment.cut(flat(model))
    expected = torch.zeros_like(drift) if included else sound.delta_N
    torch.testing.assert_close(drift, expected, rtol=1e-4, atol=1e-6)
    assert reducer.submitted[2].tokens == (0 if included else 24)


def test_a_reset_drops_what_waits_for_its_time():
    method = parse("diloco(tau=4, codec=fp32)")
    model, reducer = net(), OnOffer(method)
    worker = method.worker(model, sgd(model), reducer, inner_steps=4)
    for step in range(4):
        backward(model, step)
        worker.step(tokens=8)
    reducer.decide(reducer.submitted[0], included=True)  # taken at step 8, were it not for
    newest_N = torch.full_like(flat(model), 0.5)
    reducer.settle(Commit(position=9, params_N=newest_N, included=None, members=2, reset=True))
    model.zero_grad()
    for _ in range(6):
        worker.step(tokens=8)
    assert torch.equal(worker.synced_N, newest_N)
    assert worker.statistics().position == worker.next_position - 1 == 9
