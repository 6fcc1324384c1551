"""A worker that resumes in a run: what it saves, and what the log gives it back."""

import copy

import pytest
import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from support.reducer_bench import ME, NUMEL, OTHER, decided, entry, keep_entries

H = 2


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))
        self.register_buffer("seen", torch.zeros(3))


def spec_of(method):
    outer = {"method": method} | ({"inner_steps": 1} if method in ("ddp", "dlion") else {})
    codec = {} if method == "dlion" else {"compression": {"codec": "fp32"}}
    return RunSpec.from_dict(codec | {"outer": outer})


def worker_of(bench):
    model = Vector()
    inner = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    return bench.reducer.method.worker(model, inner, bench.reducer, inner_steps=H)


def step(worker, gradient=1.0):
    worker.model.w.grad = torch.full((NUMEL,), gradient)
    worker.step(tokens=100, loss=1.0)


def window_ended(each):
    """Return a worker whose first contribution was included, at position 1."""
    worker = worker_of(each)
    each.deliver(decided(0, ME, settles=1, included=[True] * 2))
    for _ in range(worker.inner_steps + worker.delay):
        step(worker)
    assert worker.statistics().position == 1
    return worker


def local(worker):
    return worker.model.w.detach().clone()


def vectors_in(tree):
    if isinstance(tree, torch.Tensor):
        return tree.numel() // NUMEL
    if isinstance(tree, dict):
        return sum(map(vectors_in, tree.values()))
    return sum(map(vectors_in, tree)) if isinstance(tree, list | tuple) else 0


def resumed(bench, saved, *, position, entries=()):
    after = bench(position=position)
    if entries:
        keep_entries(after.store, entries)
    worker = worker_of(after)
    worker.load_state_dict(saved)
    return worker


def test_what_is_saved_at_a_windows_end_holds_nothing_of_the_log(bench):
    worker = window_ended(bench())
    assert torch.equal(local(worker), worker.synced_N)
    worker.model.seen.fill_(3.0)
    saved = worker.state_dict()
    inner, residual = vectors_in(saved.pop("inner")), vectors_in(saved["reducer"])
    assert (inner, residual, vectors_in(saved)) == (1, 1, 1)
    again = resumed(bench, worker.state_dict(), position=1)
    assert torch.equal(local(again), local(worker))
    assert torch.equal(again.synced_N, worker.synced_N)
    assert again.model.seen.tolist() == [3.0] * 3
    assert again.inner.state_dict()["state"][0]["momentum_buffer"][0] == 1.9


def test_a_window_that_is_open_resumes_with_its_drift(bench):
    worker = window_ended(bench())
    step(worker)
    saved = worker.state_dict()
    assert vectors_in(saved) == 3  # the drift as well
    again = resumed(bench, saved, position=1)
    assert torch.allclose(local(again), local(worker), rtol=1e-7)
    assert again.step_in_window == 1


def test_a_drift_is_kept_where_the_log_went_on_without_this_peer(bench):
    worker = window_ended(bench())
    step(worker)
    drift = local(worker) - worker.synced_N
    entries = [entry(0, ME), entry(1, OTHER), entry(2, OTHER)]
    again = resumed(bench, worker.state_dict(), position=3, entries=entries)
    assert again.synced_N.unique().tolist() == [3.0]
    assert torch.allclose(local(again) - again.synced_N, drift)


def test_a_drift_is_dropped_where_the_log_has_this_peer_since(bench):
    worker = window_ended(bench())
    step(worker)
    entries = [entry(0, ME), entry(1, ME), entry(2, OTHER)]
    again = resumed(bench, worker.state_dict(), position=3, entries=entries)
    assert local(again).unique().tolist() == [3.0]
    assert again.statistics().resets == 1


def test_a_state_with_synced_in_it_resumes_as_before(bench):
    """Those of the last version have it, and local as it was."""
    worker = window_ended(bench())
    step(worker)
    saved = worker.state_dict()
    del saved["drift"]
    old = saved | {"synced_N": worker.synced_N, "model": worker.model.state_dict()}
    again = resumed(bench, old, position=1)
    assert torch.equal(local(again), local(worker))


def test_work_that_was_on_offer_is_offered_again_after_a_restart(bench):
    each = bench(patience_s=0.1)
    worker = worker_of(each)
    for _ in range(H):
        step(worker)
    assert worker.statistics().windows == 1 and each.reducer.position == 0
    drift = local(worker) - worker.synced_N
    again = resumed(bench, worker.state_dict(), position=0)
    assert torch.allclose(local(again) - again.synced_N, drift)
    assert again.statistics().left_out == 1
    assert again._windows[0].tokens == H * 100


@pytest.mark.parametrize("method", ["diloco(tau=1)", "co2", "eager(peers=2)", "ddp", "dlion"])
def test_other_methods_resume_without_synced(bench, method):
    each = bench(spec=spec_of(method), patience_s=0.1)
    worker = window_ended(each)
    saved = worker.state_dict()
    assert "synced_N" not in saved
    after = bench(position=1, spec=spec_of(method), patience_s=0.1)
    again = worker_of(after)
    again.load_state_dict(saved)
    assert torch.allclose(local(again), local(worker), rtol=1e-6)
    assert torch.equal(again.synced_N, worker.synced_N)
    step(again)


def test_commits_that_came_early_are_saved_with_the_state_before_them(bench):
    each = bench(spec=spec_of("diloco(tau=2)"), patience_s=0.1)
    worker = worker_of(each)
    for _ in range(H):
        step(worker)
    each.deliver(decided(0, ME, settles=1, included=[True] * 2))
    each.reducer.wait()
    assert each.reducer.position == 1 and worker.statistics().position == 0
    saved = copy.deepcopy(worker.state_dict())
    assert saved["synced_N"].unique().tolist() == [0.0]
    after = bench(position=1, spec=spec_of("diloco(tau=2)"), patience_s=0.1)
    again = worker_of(after)
    again.load_state_dict(saved)
    assert torch.equal(local(again), local(worker))
    for each in (worker, again):
        step(each)
        step(each)
    assert torch.equal(local(again), local(worker))
    assert torch.equal(again.synced_N, worker.synced_N)
