import copy
import io
import logging

import pytest
import torch
from torch import Tensor, nn

from atoll.optim.inprocess.group import GroupError
from atoll.optim.inprocess.rounds import InProcessGroup
from atoll.optim.methods.base import MethodError
from atoll.optim.methods.diloco import DiLoCo
from atoll.optim.reducer import Commit, Contribution
from atoll.optim.state.layout import CELL, LayoutError
from support.scripted import ScriptedReducer


def model(width: int = 4) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(seed: int, width: int = 4) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


def train_step(method: DiLoCo, seed: int) -> None:
    x = batch(seed, next(method.model.parameters()).shape[1])
    loss = (method.model(x) - x.sum(1, keepdim=True)).square().mean()
    method.inner.zero_grad()
    loss.backward()
    method.step(tokens=x.numel(), loss=loss)


def scripted(inner_steps: int = 2, width: int = 4) -> tuple[DiLoCo, ScriptedReducer]:
    reducer, net = ScriptedReducer(), model(width)
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    return DiLoCo(net, inner, reducer, inner_steps=inner_steps), reducer


def local(method: DiLoCo) -> Tensor:
    return method.layout.flatten(method.model)


def group(size: int, inner_steps: int, **options) -> tuple[InProcessGroup, list[DiLoCo]]:
    shared = InProcessGroup(size, **({"lr": 0.7, "momentum": 0.6} | options))
    methods = []
    for index in range(size):
        net = model()
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        methods.append(DiLoCo(net, inner, shared.member(index), inner_steps=inner_steps))
    return shared, methods


def run(methods: list[DiLoCo], steps: range) -> None:
    for step in steps:
        for index, method in enumerate(methods):
            train_step(method, 100 * step + index)


def test_one_peer_one_step_outer_sgd_of_one_equals_adamw():
    shared, (method,) = group(1, 1, lr=1.0, momentum=0.0, codec="fp32")
    plain = model()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(50):
        train_step(method, 100 * step)
        x = batch(100 * step)
        adamw.zero_grad()
        (plain(x) - x.sum(1, keepdim=True)).square().mean().backward()
        adamw.step()
    torch.testing.assert_close(local(method), method.layout.flatten(plain), rtol=1e-5, atol=1e-6)
    assert shared.state.position == 50


def plain_diloco(workers: int, rounds: int, inner_steps: int) -> Tensor:
    """Algorithm 1 of arXiv:2311.08105 in a few lines, with PyTorch's own outer optimizer."""
    synced = model()
    outer = torch.optim.SGD(synced.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    replicas = [model() for _ in range(workers)]
    inners = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in replicas]
    for round_ in range(rounds):
        for index, (net, inner) in enumerate(zip(replicas, inners, strict=True)):
            net.load_state_dict(synced.state_dict())
            for step in range(inner_steps):
                x = batch(100 * (round_ * inner_steps + step) + index)
                inner.zero_grad()
                (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
                inner.step()
        locals_ = zip(*(net.parameters() for net in replicas), strict=True)
        for param, mine in zip(synced.parameters(), locals_, strict=True):
            param.grad = param.detach() - torch.stack([p.detach() for p in mine]).mean(0)
        outer.step()
    return torch.nn.utils.parameters_to_vector(synced.parameters()).detach()


def test_four_workers_equal_a_plain_implementation_of_the_paper():
    shared, methods = group(4, 5, codec="fp32")
    run(methods, range(20))
    expected_N = plain_diloco(workers=4, rounds=4, inner_steps=5)
    torch.testing.assert_close(shared.state.params_N, expected_N, rtol=1e-4, atol=1e-5)


def test_delta_is_synced_minus_local_and_local_takes_the_commit():
    method, reducer = scripted()
    start_N = local(method)
    new_N = torch.full_like(start_N, 0.25)
    everywhere = torch.ones(1, dtype=torch.bool)
    reducer.queue = [[Commit(position=1, params_N=new_N, included=everywhere, members=3)]]
    train_step(method, 1)
    trained_N = None
    original = reducer.submit

    def submit(contribution):
        nonlocal trained_N
        trained_N = local(method)
        original(contribution)

    reducer.submit = submit
    train_step(method, 2)
    (contribution,) = reducer.submitted
    assert torch.equal(contribution.delta_N, start_N - trained_N)
    assert (contribution.window, contribution.tokens, contribution.steps) == (0, 64, 2)
    assert torch.equal(local(method), new_N)
    assert torch.equal(method.synced_N, new_N)
    assert method.statistics().included == 1


@pytest.mark.parametrize(("included", "vectors"), [([True, True], 1), ([True, False], 3)])
def test_old_parameters_go_to_the_model_only_where_they_count(included, vectors, monkeypatch):
    method, reducer = scripted(width=CELL // 5 + 1_000)  # two cells
    new_N = torch.full_like(local(method), 0.25)
    counts = torch.tensor(included)
    reducer.queue = [[Commit(position=1, params_N=new_N, included=counts, members=3)]]
    change, given = method.places.change_, []

    def counted(model, index, rule, *values):
        given.append(len(values))
        change(model, index, rule, *values)

    monkeypatch.setattr(method.places, "change_", counted)
    for seed in range(2):
        train_step(method, seed)
    assert given == [vectors]  # a GPU holds a copy of each


def test_left_out_work_is_in_the_next_contribution_once():
    method, reducer = scripted()
    start_N = local(method)
    shift_N = torch.full_like(start_N, 0.5)
    left_out = Commit(position=1, params_N=start_N + shift_N, included=None, members=3)
    reducer.queue = [[left_out]]
    for seed in range(2):
        train_step(method, seed)
    first = reducer.submitted[0].delta_N
    torch.testing.assert_close(method.synced_N - local(method), first)
    for seed in range(2, 4):
        train_step(method, seed)
    second = reducer.submitted[1]
    assert (second.tokens, second.steps, second.window) == (128, 4, 1)
    torch.testing.assert_close(second.delta_N, method.synced_N - local(method))
    assert method.statistics().left_out == 1


def test_cells_that_were_left_out_stay_in_the_drift():
    width = CELL // 5 + 1_000  # two cells
    method, reducer = scripted(width=width)
    start_N = local(method)
    new_N = start_N + 0.5
    halves = torch.tensor([True, False])
    reducer.queue = [[Commit(position=1, params_N=new_N, included=halves, members=2)]]
    for seed in range(2):
        train_step(method, seed)
    delta_N = reducer.submitted[0].delta_N
    assert torch.equal(local(method)[:CELL], new_N[:CELL])
    torch.testing.assert_close((new_N - local(method))[CELL:], delta_N[CELL:], atol=1e-6, rtol=0)


def test_peer_trains_on_past_the_deadline_and_keeps_the_new_steps():
    method, reducer = scripted()
    start_N = local(method)
    for seed in range(2):
        train_step(method, seed)
    submitted_N = local(method)
    new_N = start_N * 0.5
    everywhere = torch.ones(1, dtype=torch.bool)
    reducer.queue = [[Commit(position=1, params_N=new_N, included=everywhere, members=2)]]
    assert torch.equal(reducer.submitted[0].delta_N, start_N - submitted_N)
    other, _ = scripted(inner_steps=100)
    for seed in range(3):
        train_step(other, seed)
    later_N = local(other)
    train_step(method, 2)
    torch.testing.assert_close(local(method), new_N + (later_N - submitted_N))
    train_step(method, 3)
    assert (reducer.submitted[1].tokens, reducer.submitted[1].steps) == (64, 2)


def test_at_most_one_contribution_is_unsettled_and_the_window_grows():
    method, reducer = scripted()
    for seed in range(7):
        train_step(method, seed)
    assert len(reducer.submitted) == 1
    assert method.step_in_window == 5
    everywhere = torch.ones(1, dtype=torch.bool)
    commit = Commit(position=1, params_N=method.synced_N, included=everywhere, members=1)
    reducer.queue = [[commit]]
    train_step(method, 7)
    assert reducer.submitted[1].steps == 6
    assert method.step_in_window == 0


def test_only_a_worker_that_waits_hands_in_memory_that_may_be_overwritten():
    for delay in (0, 1):
        method, reducer = scripted()
        method.resize(2, delay=delay)
        for seed in (1, 2):
            train_step(method, seed)
        (contribution,) = reducer.submitted
        delta, pending = contribution.delta, method._windows[0].pending
        assert delta.spends is (delay == 0)
        assert pending is not None
        if delay:
            assert pending.local_N is delta.b_F
        else:
            assert pending.local_N is not delta.b_F


def test_earlier_entry_moves_local_and_leaves_the_contribution_pending():
    method, reducer = scripted()
    start_N = local(method)
    earlier = Commit(position=1, params_N=start_N + 0.5, included=None, members=2, settles=False)
    mine = Commit(position=2, params_N=start_N + 0.75, included=torch.tensor([True]), members=2)
    reducer.queue = [[earlier, mine]]
    for seed in range(2):
        train_step(method, seed)
    torch.testing.assert_close(local(method), start_N + 0.75)
    assert method.statistics().included == 1
    assert method.statistics().position == 2


def test_reset_drops_drift_pending_and_the_window():
    method, reducer = scripted()
    new_N = torch.full_like(local(method), 0.125)
    commit = Commit(position=9, params_N=new_N, included=None, members=2, reset=True)
    reducer.queue = [[commit]]
    for seed in range(2):
        train_step(method, seed)
    assert torch.equal(local(method), new_N)
    assert method.statistics().resets == 1
    for seed in range(2):
        train_step(method, seed)
    assert reducer.submitted[1].tokens == 64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_window_that_is_not_finite_never_reaches_the_reducer(value, caplog):
    method, reducer = scripted()
    method.inner.param_groups[0]["momentum"] = 0.9
    start_N = local(method)
    train_step(method, 0)
    assert method.inner.state
    with torch.no_grad():
        method.model[0].weight[0, 0] = value
    with caplog.at_level(logging.WARNING):
        train_step(method, 1)
    assert "NaN or infinity" in caplog.text
    (contribution,) = reducer.submitted
    assert contribution.tokens == 0
    assert not contribution.delta_N.any()
    assert torch.equal(local(method), start_N)
    assert not method.inner.state
    assert method.statistics().discarded == 1


def test_replicas_have_the_same_bits_after_each_round():
    shared, methods = group(4, 3)
    for round_ in range(5):
        run(methods, range(3 * round_, 3 * round_ + 3))
        for method in methods:
            assert torch.equal(local(method), shared.state.params_N)
    assert shared.state.position == 5
    assert shared.statistics().rounds == 5


def test_contributions_of_no_tokens_do_not_move_the_others():
    _, (worker, joiner) = group(2, 2, momentum=0.0, codec="fp32")
    _, (alone,) = group(1, 2, momentum=0.0, codec="fp32")
    for step in range(4):
        train_step(alone, 100 * step)
        train_step(worker, 100 * step)
        x = batch(999 + step)
        joiner.inner.zero_grad()
        joiner.model(x).sum().backward()
        joiner.inner.step()
        joiner.advance(tokens=0)
    assert torch.equal(local(joiner), local(worker))
    torch.testing.assert_close(local(worker), local(alone))


def test_round_of_no_tokens_at_all_keeps_the_state():
    shared, methods = group(2, 1)
    start_N = shared.state.params_N.clone()
    for method in methods:
        method.advance(tokens=0)
    assert shared.state.position == 1
    assert torch.equal(shared.state.params_N, start_N)


def snapshot(methods: list[DiLoCo]) -> bytes:
    file = io.BytesIO()
    torch.save([method.state_dict() for method in methods], file)
    return file.getvalue()


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_resume_in_the_middle_of_a_window_gives_the_same_bits(stop):
    shared, methods = group(3, 3)
    run(methods, range(stop))
    saved = snapshot(methods)
    run(methods, range(stop, 12))
    shared_again, again = group(3, 3)
    for method, state in zip(again, torch.load(io.BytesIO(saved), weights_only=True), strict=True):
        method.load_state_dict(state)
    run(again, range(stop, 12))
    assert shared_again.state.root() == shared.state.root()
    for one, other in zip(methods, again, strict=True):
        assert torch.equal(local(one), local(other))
        residuals = [m.reducer.state_dict()["feedback"]["mass_N"] for m in (one, other)]
        assert torch.equal(*residuals)
        assert one.statistics().tokens == other.statistics().tokens


def test_resume_with_a_reduction_in_flight_gives_the_same_bits():
    shared, methods = group(2, 2)
    run(methods, range(3))
    train_step(methods[0], 300)
    saved = snapshot(methods)
    train_step(methods[1], 301)
    run(methods, range(4, 8))
    shared_again, again = group(2, 2)
    for method, state in zip(again, torch.load(io.BytesIO(saved), weights_only=True), strict=True):
        method.load_state_dict(state)
    train_step(again[1], 301)
    run(again, range(4, 8))
    assert shared_again.state.root() == shared.state.root()


def test_state_dict_is_not_changed_by_training_on():
    _, methods = group(2, 2)
    run(methods, range(3))
    state = methods[0].state_dict()
    feedback = copy.deepcopy(state["reducer"]["feedback"])
    params_N = state["reducer"]["params_N"].clone()
    run(methods, range(3, 6))
    assert torch.equal(state["reducer"]["feedback"]["mass_N"], feedback["mass_N"])
    assert torch.equal(state["reducer"]["params_N"], params_N)


def test_state_of_another_model_is_refused():
    method, _ = scripted()
    other, _ = scripted(width=5)
    with pytest.raises(LayoutError):
        other.load_state_dict(method.state_dict())


def test_what_is_no_state_is_refused():
    method, _ = scripted()
    with pytest.raises(LayoutError, match="state_dict"):
        method.load_state_dict({})


def test_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(model().parameters())
    with pytest.raises(LayoutError, match="this model's parameters"):
        DiLoCo(model(), optimizer, ScriptedReducer(), inner_steps=2)


def test_worker_that_the_group_does_not_have_is_refused():
    with pytest.raises(GroupError, match="0 to 1, got 2"):
        InProcessGroup(2).member(2)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_outer_constants_out_of_range_are_refused(options):
    with pytest.raises(MethodError, match="expected"):
        InProcessGroup(2, **options)


def test_worker_that_runs_ahead_waits_for_its_settlement():
    _, (one, other) = group(2, 2)
    for seed in range(5):
        train_step(one, seed)
    assert one.statistics().windows == 1
    for seed in range(2):
        train_step(other, seed)
    assert other.statistics().included == 1
    assert one.statistics().included == 1


def test_second_contribution_before_the_first_is_settled_is_refused():
    shared, _ = group(2, 2)
    member = shared.member(0)
    contribution = Contribution(
        window=0, delta=torch.zeros(shared.state.layout.numel), tokens=1, steps=1, loss=1.0
    )
    member.submit(contribution)
    with pytest.raises(GroupError, match="submit window 0 first"):
        member.submit(contribution)


def test_contribution_with_nan_is_refused_by_the_group():
    shared, _ = group(2, 2)
    delta_N = torch.full((shared.state.layout.numel,), float("nan"))
    with pytest.raises(GroupError, match="finite"):
        shared.member(0).submit(Contribution(window=0, delta=delta_N, tokens=1, steps=1, loss=1.0))


def test_outlier_is_clipped():
    shared, _ = group(3, 1, codec="fp32", momentum=0.0, lr=1.0)
    numel = shared.state.layout.numel
    start_N = shared.state.params_N.clone()
    for index, scale in enumerate((1.0, 1.0, 100.0)):
        delta_N = torch.full((numel,), scale)
        shared.member(index).submit(
            Contribution(window=0, delta=delta_N, tokens=8, steps=1, loss=1.0)
        )
    torch.testing.assert_close(shared.state.params_N, start_N - 4.0 / 3.0)
    assert shared.statistics().clipped == 1


def test_workers_of_another_model_are_refused():
    shared, _ = group(2, 2)
    net = nn.Linear(3, 3)
    with pytest.raises(GroupError, match="one model"):
        DiLoCo(net, torch.optim.SGD(net.parameters()), shared.member(1), inner_steps=2)


def test_window_without_steps_is_refused():
    net = model()
    with pytest.raises(ValueError, match="inner step"):
        DiLoCo(net, torch.optim.SGD(net.parameters()), ScriptedReducer(), inner_steps=0)


def test_tokens_that_a_tensor_counts_are_a_number():
    method, reducer = scripted()
    for _ in range(2):
        method.advance(tokens=torch.ones(8, dtype=torch.bool).sum())
    (contribution,) = reducer.submitted
    assert type(contribution.tokens) is int
    assert contribution.tokens == method.statistics().tokens == 16
    with pytest.raises(TypeError):
        method.advance(tokens=8.5)


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_a_model_whose_parameters_change_says_so(change):
    method, _ = scripted()
    train_step(method, 0)
    if change == "freeze":
        method.model[2].requires_grad_(False)
    else:
        method.model.append(nn.Linear(1, 1))
    with pytest.raises(LayoutError, match="neither freeze nor add"):
        train_step(method, 1)


def test_both_clocks_run():
    _, methods = group(2, 2)
    run(methods, range(4))
    stats = methods[0].statistics()
    assert stats.compute_s > 0
    assert stats.wait_s > 0
    assert (stats.windows, stats.steps, stats.tokens) == (2, 4, 128)
    assert stats.loss > 0
