"""Compare the predictions of `atoll plan` with groups' traffic, measured rounds and memory."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import in_process, methods
from atoll.optim.log.replay import cells_of
from atoll.optim.reduction.cells import LENGTH, TERM
from atoll.optim.state.layout import Layout
from atoll.optim.state.pieces import codec_of
from atoll.peer.lab import plan
from atoll.peer.lab.plan import PlanError, Setting, predict
from atoll.peer.lab.work import Work, timed
from atoll.peer.training.opening import build_model
from atoll.peer.training.resources import LEDGER_PROCESS_BYTES, PEER_PROCESS_BYTES

SPECS = (
    "ddp",
    "ddp(codec=powersgd)",
    "diloco",
    "diloco(codec=2bit)",
    "streaming(count=2, tau=1)",
    "streaming(count=3, pattern=sequential)",
    "eager",
    "co2",
    "muloco(codec=int4)",
    "sparseloco",
    "demo",
    "dlion",
    "noloco",
)
BY_CODEC = (
    "diloco(codec=mixed(*norm*=fp16, *=int8))",
    "diloco(codec=dct)",
    "diloco(codec=zstd)",
    "diloco(codec=topk(k=128)+2bit)",
    "streaming(count=2, codec=dct)",
    "muloco(codec=powersgd+int8)",
    "sparseloco(merge=select, tau=32)",
    "demo(average=senders)",
)
LAB = {"rtt_s": 0.05, "step_s": 1.0}


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    return nn.ModuleDict({"first": nn.Linear(3, 96), "blocks": blocks})


def sent_in_a_window(spec: str, size: int, inner_steps: int = 6) -> int:
    """Return the payload of all workers in the second window, with random gradients."""
    method = methods.parse(spec)
    group, workers = in_process(size, method), []
    for index in range(size):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        member = group.member(index)
        workers.append(method.worker(model, inner, member, inner_steps=inner_steps))
    generator = torch.Generator().manual_seed(1)
    sent = [0, 0]
    for window, step in itertools.product(range(2), range(1 if method.every_step else 6)):
        before = group.statistics().wire_bytes
        for worker in workers:
            noise_N = torch.randn(worker.layout.numel, generator=generator)
            for param, grad in zip(
                worker.model.parameters(), worker.layout.split(noise_N), strict=True
            ):
                param.grad = grad.clone()
            worker.step(tokens=8, loss=float(step))
        sent[window] += group.statistics().wire_bytes - before
    return sent[1]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "peers", [1, 3, *(pytest.param(peers, marks=pytest.mark.exhaustive) for peers in (2, 4))]
)
def test_bytes_are_those_that_workers_send(spec, peers):
    """And the headers of cells; gathered frames go by the owners, one way more than directly."""
    method, setting = methods.parse(spec), Setting(peers=peers, mbit_s=100.0, **LAB)
    expected = predict(method, net(), setting, inner_steps=6).sent_bytes * peers
    frames = sent_in_a_window(spec, peers)
    cells = sum(len(f.pieces) for f in method.fragments(Layout.of(net()))) * (peers - 1)
    if method.reduction == "mean":
        frames += cells * 2 * LENGTH.size
    elif method.reduction == "low-rank":
        frames += cells * 4 * LENGTH.size
    elif method.reduction == "gather":
        frames += frames / peers + cells * (2 * LENGTH.size + peers * TERM.size)
    assert expected == pytest.approx(frames, abs=peers)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("nano", {}),
        ("nano", {"dim": 200, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 700}),
        pytest.param("30m", {}, marks=pytest.mark.exhaustive),
        pytest.param("350m", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_sizes_are_those_of_all_chunks_one_by_one(preset, overrides):
    run = RunSpec.from_dict({"model": {"preset": preset, "overrides": overrides}})
    layout = Layout.of(plan.bare_model(run))
    for spec in (*SPECS[:5], *SPECS[6:], *BY_CODEC):
        method = methods.parse(spec)
        fragments = plan.fragments_of(method, layout)
        for size, fragment in zip(plan.sizes_of(method, layout), fragments, strict=True):
            pieces = [(codec_of(method.codec, dims), dims) for dims in fragment.pieces]
            assert size.body_bytes == sum(codec.wire_bytes(dims) for codec, dims in pieces)
            assert (size.numel, size.num_chunks) == (fragment.numel, len(pieces))
            if method.reduction == "pairs":
                continue
            down = cells_of(method, fragment)
            up = replace(down, gathers=False, by_senders=False)
            assert size.up_bytes() == up.max_body_bytes(1)
            for members in (1, 3, 8):
                assert size.down_bytes(members) == down.max_body_bytes(members)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_of_70b_has_few_kinds_of_chunks(spec):
    overrides = {
        "dim": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "ffn_dim": 28672,
    }
    run = RunSpec.from_dict(
        {"model": {"preset": "1b", "overrides": overrides | {"ffn_dim": 28672}}}
    )
    layout = Layout.of(plan.bare_model(run))
    sizes = plan.sizes_of(methods.parse(spec), layout)
    assert sum(size.numel for size in sizes) == layout.numel > 60e9
    assert sum(len(size.chunks) for size in sizes) < 20


INT8 = Work(
    offer_s=3.8e-9,
    owner_s=5.6e-9,
    owner_more_s=1.3e-9,
    receiver_s=1.6e-9,
    receiver_more_s=0.0,
    apply_s=1.1e-9,
)
"""As timed where the rounds below were measured."""


@pytest.mark.parametrize(
    ("peers", "mbit_s", "rtt_s", "measured_s", "measured_mb"),
    [(4, 100, 0.05, 1.38, 15.43), (8, 100, 0.05, 1.79, 18.00)],
)
def test_rounds_that_were_measured_are_within_15_percent(
    peers, mbit_s, rtt_s, measured_s, measured_mb, monkeypatch
):
    """docs/benchmarks/plan.md, 10M parameters: all hosts share two cores."""
    monkeypatch.setattr(plan, "timed", lambda method: INT8)
    setting = Setting(peers=peers, mbit_s=mbit_s, rtt_s=rtt_s, step_s=1.0, cores=2 / peers)
    layout = Layout(names=("all",), shapes=((10_000_000,),))
    method = methods.parse("diloco")
    (fragment,) = plan.sizes_of(method, layout)
    assert fragment.body_bytes == 10_157_474
    sent = plan.sent_bytes(method, fragment, peers)
    cpu_s = plan.cpu_s(method, fragment, sent, setting)
    assert plan.round_s(sent, setting, cpu_s) == pytest.approx(measured_s, rel=0.15)
    assert sent * plan.WIRE_OVERHEAD / 1e6 == pytest.approx(measured_mb, rel=0.005)


def test_a_slow_link_bounds_a_round_and_a_slow_machine_too():
    slow = Setting(peers=4, mbit_s=1.0, rtt_s=0.0, step_s=1.0, cores=1000.0)
    assert plan.round_s(125_000, slow, 0.1) == pytest.approx(plan.WIRE_OVERHEAD, rel=0.01)
    busy = Setting(peers=4, mbit_s=1e6, rtt_s=0.0, step_s=1.0, cores=0.01)
    assert plan.round_s(1e6, busy, 0.1) == pytest.approx(10.0)


def test_nothing_is_faster_than_the_processor(monkeypatch):
    """However much of its rounds a method hides."""
    monkeypatch.setattr(
        plan,
        "timed",
        lambda method: Work(
            offer_s=1e-5,
            owner_s=2e-5,
            owner_more_s=2e-5,
            receiver_s=0.0,
            receiver_more_s=0.0,
            apply_s=3e-5,
        ),
    )
    setting = Setting(peers=4, mbit_s=1e6, rtt_s=0.0, step_s=0.01, cores=0.5)
    cost = predict(methods.parse("eager"), net(), setting, inner_steps=10)
    busy_s = 6e-5 * Layout.of(net()).numel / 0.5
    assert 0.1 + cost.lost_s > busy_s > 1.0


@pytest.mark.parametrize(
    ("spec", "peers", "waits_s"),
    [
        ("diloco", 4, 1.0),
        ("diloco", 1, 0.0),  # for whom?
        ("diloco(tau=2)", 4, 0.0),  # two steps of the next window hide it
        ("ddp", 4, 0.0),  # its steps are the same everywhere
    ],
)
def test_each_round_waits_for_the_last_peer_for_some_steps(spec, peers, waits_s):
    punctual = Setting(peers=peers, mbit_s=1e6, rtt_s=0.0, step_s=0.5)
    late = replace(punctual, late_steps=2.0)
    of = partial(predict, methods.parse(spec), net(), inner_steps=50)
    assert of(late).lost_s - of(punctual).lost_s == pytest.approx(waits_s, abs=0.02)


@pytest.mark.parametrize("spec", SPECS)
def test_the_work_of_a_method_is_timed_once(spec):
    threads = torch.get_num_threads()
    work = timed(methods.parse(spec))
    assert work == timed(methods.parse(spec))
    assert min(work.offer_s, work.inside_s(4), work.apply_s) > 0
    assert torch.get_num_threads() == threads


def test_owners_share_the_mean_and_receive_the_rest():
    work = Work(
        offer_s=0.0,
        owner_s=5.0,
        owner_more_s=1.0,
        receiver_s=2.0,
        receiver_more_s=0.0,
        apply_s=0.0,
    )
    assert work.inside_s(1) == 5.0
    assert work.inside_s(4) == pytest.approx((5.0 + 3 * 1.0) / 4 + 3 / 4 * 2.0)
    gathered = replace(work, receiver_more_s=2.0)
    assert gathered.inside_s(4) == pytest.approx((5.0 + 3 * 1.0) / 4 + 3 / 4 * (2.0 + 3 * 2.0))


def costs(spec: str, mbit_s: float, step_s: float = 0.5) -> plan.Prediction:
    setting = Setting(peers=4, mbit_s=mbit_s, step_s=step_s)
    return predict(methods.parse(spec), net(), setting, inner_steps=10)


def test_delays_hide_what_fits_into_them():
    waiting, late, streaming = (
        costs(spec, 1.0) for spec in ("diloco", "eager", "streaming(tau=2)")
    )
    assert waiting.lost_s > waiting.round_s
    assert late.lost_s == pytest.approx(waiting.lost_s - waiting.round_s, abs=0.01)
    assert streaming.utilisation > 0.95 > waiting.utilisation
    assert streaming.lost_s == pytest.approx(2 * plan.SETTLE_S, abs=0.01)


def test_what_does_not_fit_is_waited_for():
    crawling = costs("eager", 0.01)
    assert crawling.round_s > 10 * 0.5
    assert crawling.lost_s == pytest.approx(crawling.round_s - 10 * 0.5 + plan.SETTLE_S, abs=0.01)
    tight = costs("streaming(tau=2)", 0.1)
    assert tight.lost_s == pytest.approx(tight.round_s - 2 * 2 * 0.5 + 2 * plan.SETTLE_S, abs=0.01)


def test_methods_that_send_every_step_have_no_window():
    cost = costs("ddp", 10.0)
    assert cost.inner_steps == 1
    assert cost.utilisation == pytest.approx(0.5 / (0.5 + cost.lost_s))
    assert cost.steps_per_s == pytest.approx(cost.utilisation / 0.5)


def test_one_peer_waits_for_nobody():
    cost = predict(
        methods.parse("diloco"), net(), Setting(peers=1, mbit_s=1.0, **LAB), inner_steps=10
    )
    assert (cost.sent_bytes, cost.round_s) == (0, 0.0)
    assert cost.lost_s == pytest.approx(plan.SETTLE_S, abs=0.01)


def test_chunks_of_a_sparse_codec_travel_together():
    layout = Layout.of(net())
    for spec, share in (("diloco", 1), ("muloco(codec=sign)", 1), ("sparseloco", 16)):
        (size,) = plan.sizes_of(methods.parse(spec), layout)
        assert size.num_turns() == pytest.approx(size.num_chunks / share)
    assert plan.sizes_of(methods.parse("noloco"), layout)[0].num_turns() > 0


def test_memory_follows_what_a_method_keeps():
    numel = Layout.of(net()).numel
    memory = {spec: costs(spec, 1.0).memory_bytes for spec in SPECS}
    of_model = memory["diloco"] - PEER_PROCESS_BYTES
    # 3 vectors of the model and inner state, 2 common ones, the update, the residual, its change
    # and a quarter of the loss, and four bodies
    assert 4 * numel * 9.25 < of_model < 4 * numel * 9.5
    # A worker that does not wait also keeps its gradients, and what it handed in.
    assert memory["eager"] - memory["diloco"] == 4 * numel * 8
    assert memory["co2"] - memory["diloco"] == 4 * numel * 5
    assert memory["muloco(codec=int4)"] < memory["diloco"]
    assert costs("streaming(tau=2)", 1.0).memory_bytes == costs("streaming", 1.0).memory_bytes
    assert memory["diloco"] - costs("diloco(state=bf16)", 1.0).memory_bytes == 2 * numel


def test_a_run_needs_memory_and_disk_of_each_machine():
    spec = RunSpec.from_dict({"round": {"log_mb": 1}, "coordinator": {"keep_checkpoints": 3}})
    model = build_model(spec, 256)
    numel, needs = Layout.of(model).numel, plan.needed(spec, model, 2)
    assert needs.inner_memory == 12 * numel
    assert needs.coordinator_memory - LEDGER_PROCESS_BYTES == pytest.approx(10 * numel, rel=0.01)
    # four snapshots of 8 bytes a parameter, 16 saved, twelve updates of int8
    assert needs.peer_disk == pytest.approx((32 + 16 + 12) * numel, rel=0.02)
    assert needs.peer_disk_free == (8 + 16) * numel
    assert needs.coordinator_disk == (3 + 3) * 8 * numel
    assert needs.coordinator_disk_free == 2 * 8 * numel
    assert needs.coordinator_disk_a_round == pytest.approx(numel, rel=0.05)
    assert needs.peer_state == 12 * numel  # with the update
    assert needs.coordinator_state == 8 * numel
    half = plan.needed(RunSpec.from_dict({"outer": {"state": "bf16"}}), model, 2)
    assert (half.peer_state, half.coordinator_state) == (10 * numel, 6 * numel)
    assert half.coordinator_disk_free == 2 * 6 * numel
    budget = RunSpec.from_dict({"round": {"log_mb": 512}})
    assert plan.needed(budget, model, 2).peer_disk == (32 + 16) * numel + 512_000_000


def test_frozen_weights_and_small_moments_are_counted():
    spec = RunSpec.from_dict({"inner": {"state": "8bit"}})
    model = build_model(spec, 256)
    whole = Layout.of(model).numel
    assert plan.needed(spec, model, 2).inner_memory == (4 + 2) * whole
    for param in list(model.parameters())[1:]:
        param.requires_grad_(False)
    trained = Layout.of(model).numel
    needs = plan.needed(spec, model, 2)
    assert 0 < trained < whole
    assert needs.inner_memory == (4 + 2) * trained + 4 * (whole - trained)


def test_large_models_are_planned_without_their_weights():
    spec = RunSpec.from_dict({"model": {"preset": "1b"}})
    model = plan.bare_model(spec)
    assert all(param.device.type == "meta" for param in model.parameters())
    setting = Setting(peers=8, mbit_s=1000.0, step_s=10.0)
    cost = predict(methods.parse("sparseloco"), model, setting, inner_steps=30)
    assert cost.sent_bytes > 100e6


def test_the_bare_model_has_the_layout_of_the_real_one():
    spec = RunSpec()
    assert Layout.of(plan.bare_model(spec)) == Layout.of(build_model(spec, 256))


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": 0},
        {"mbit_s": 0.0},
        {"step_s": 0.0},
        {"rtt_s": -1.0},
        {"cores": 0.0},
        {"late_steps": -1.0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    fields = {"peers": 4, "mbit_s": 100.0, "step_s": 0.1} | wrong
    with pytest.raises(PlanError, match="expected"):
        Setting(**fields)
