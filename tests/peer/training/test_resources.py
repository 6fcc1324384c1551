"""What the memory of a peer is made of."""

import pytest
import torch

from atoll.coordinator.run.spec import RunSpec
from atoll.optim import methods
from atoll.optim.inprocess.gossip import Side, meet
from atoll.optim.state import vectors
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.consent import needs_of
from atoll.peer.lab.advice import as_run
from atoll.peer.lab.plan import PlanError, bare_model, needed, sizes_of
from atoll.peer.recovery import bodies as of_recovery
from atoll.peer.training.activations import step_of
from atoll.peer.training.resources import (
    BODIES_AHEAD,
    BODIES_AHEAD_BYTES,
    LAUNCHER_PROCESS_BYTES,
    MEETING_VECTORS,
    PEER_BODIES,
    PEER_PROCESS_BYTES,
    RANK_PROCESS_BYTES,
    Weights,
    recovery_bytes,
    spare_bytes,
)
from support.live_memory import Live


def test_a_meeting_takes_as_many_vectors_as_it_is_said_to():
    numel = 1_000_000
    layout = Layout(names=("w",), shapes=((numel,),))
    method = methods.parse("noloco")
    state = OuterState.genesis(layout, torch.randn(numel), torch.zeros(numel))
    sides = [Side(delta_N=torch.randn(numel), params_N=torch.randn(numel)) for _ in range(2)]
    decoded = [vector_N for side in sides for vector_N in (side.delta_N, side.params_N)]
    contribution = 1
    with Live(state.params_N, state.momentum_N, *decoded) as live:
        meet(method, method.fragments(layout)[0], state, *sides, inner_lr=0.1)
    vectors = contribution + len(decoded) + live.peak / (4 * numel)
    assert vectors == pytest.approx(MEETING_VECTORS, rel=0.01)
    spec = RunSpec.from_dict({"outer": {"method": "noloco"}, "model": {"preset": "30m"}})
    model = bare_model(spec)
    beside = needed(spec, model, 2).peer_memory - PEER_PROCESS_BYTES
    assert beside == (12 + 8 + 4 * MEETING_VECTORS) * Layout.of(model).numel


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_further_rank_has_a_model_of_its_own(ranks):
    spec = RunSpec.from_dict({"model": {"preset": "30m"}})
    model = bare_model(spec)
    numel, more = Layout.of(model).numel, ranks - 1
    one, several = (needed(spec, model, 2, ranks=each) for each in (1, ranks))
    models = 16 * ranks - 12  # all have their gradients when they take the most
    processes = LAUNCHER_PROCESS_BYTES + more * RANK_PROCESS_BYTES + models * numel
    rest = several.peer_memory - one.peer_memory - processes
    # own values twice on all but one, and the frames of all at the first and once more
    assert rest == pytest.approx((8 * more / ranks + more / ranks + 1) * numel, rel=0.05)
    assert (one.inner_memory, several.inner_memory) == (12 * numel, 16 * ranks * numel)
    on_host = several.host_memory(on_gpu=True) - one.host_memory(on_gpu=True)
    assert on_host < processes
    assert several.step_memory > one.step_memory + more * 16 * numel
    assert several.gpu_memory == one.gpu_memory
    assert several.coordinator_memory == one.coordinator_memory


def test_a_stage_keeps_its_gradients_in_a_round():
    layout = Layout.of(bare_model(RunSpec.from_dict({"model": {"preset": "30m"}})))
    dense = RunSpec.from_dict({})
    stages = RunSpec.from_dict({"topology": {"stages": 2}})
    one, stage = (needs_of(spec, layout) for spec in (dense, stages))
    assert stage.inner_memory - one.inner_memory == 4 * layout.numel
    assert stage.peer_memory - one.peer_memory >= 4 * layout.numel


def spec_of(method, preset):
    return RunSpec.from_dict(as_run(method, 30) | {"model": {"preset": preset}})


def test_a_peer_that_leaps_holds_two_states():
    """A method that keeps no residual takes less than that in a round."""
    spec = spec_of("diloco(feedback=0, codec=int4)", "30m")
    model = bare_model(spec)
    needs, numel = needed(spec, model, 2), Layout.of(model).numel
    # One that joins has one, the update, its model on the way to the device, and bodies.
    (body,) = (f.body_bytes for f in sizes_of(spec.method(), Layout.of(model)))
    joins = PEER_PROCESS_BYTES + 16 * numel + BODIES_AHEAD_BYTES + body
    assert needs.host_memory(on_gpu=True) == joins
    assert needs.recovery_memory == PEER_PROCESS_BYTES + 32 * numel
    assert needs.host_memory(on_gpu=False) >= needs.recovery_memory > needs.peer_memory
    keeps_it = needed(spec_of("diloco", "30m"), model, 2)
    assert keeps_it.peer_memory > keeps_it.recovery_memory == needs.recovery_memory + 4 * numel


def test_a_peer_that_joins_has_bodies_that_come_ahead():
    ahead = (of_recovery.BODIES_AHEAD, of_recovery.BODIES_AHEAD_BYTES)
    assert (BODIES_AHEAD, BODIES_AHEAD_BYTES) == ahead
    spec = spec_of("diloco(state=bf16)", "nano")
    weights = Weights.of(spec.method(), bare_model(spec))
    numel = weights.layout.numel
    # With the one that is applied.
    for body, bodies in ((numel, 7 * numel), (48 << 20, 112 << 20), (80 << 20, 160 << 20)):
        joins = PEER_PROCESS_BYTES + (6 + 4) * numel + bodies
        assert recovery_bytes(spec.method(), weights, bodies=[body]) == joins


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_a_state_on_a_disk_leaves_what_a_round_makes(state):
    spec = spec_of(f"diloco(state={state})", "30m")
    model = bare_model(spec)
    needs, numel = needed(spec, model, 2), Layout.of(model).numel
    frames = PEER_BODIES * sum(f.body_bytes for f in sizes_of(spec.method(), Layout.of(model)))
    # model and moments, residual before and after, the loss of half of the values
    left = PEER_PROCESS_BYTES + (12 + 8 + 2) * numel + frames
    assert needs.peer_memory - needs.peer_state == left
    # with gradients, the residual, and a spare vector: in memory of all values
    activations = step_of(spec, Layout.of(model), half=False).more_bytes
    rest = needs.step_memory - PEER_PROCESS_BYTES - activations - (16 + 4 + 4) * numel
    assert rest == (4 + spec.method().memory_dtype.itemsize) * numel
    in_step = needs.step_memory - needs.step_state
    assert in_step == PEER_PROCESS_BYTES + (16 + 4 + 2) * numel + activations
    assert needs.host_memory(on_gpu=False, state_on_disk=True) == max(left, in_step)
    on_host = needs.host_memory(on_gpu=True, state_on_disk=True)
    assert on_host == left - needs.inner_memory
    # One that fetches a state has no more than its bodies and residual in memory.
    fetching = needs.recovery_memory - needs.recovery_state
    longest = max(f.body_bytes for f in sizes_of(spec.method(), Layout.of(model)))
    assert fetching <= PEER_PROCESS_BYTES + 20 * numel + BODIES_AHEAD_BYTES + longest


def test_what_waits_in_a_step_is_what_a_peer_keeps(monkeypatch):
    monkeypatch.setattr(vectors, "_keeps", True)
    monkeypatch.setattr(vectors, "_most", vectors.SHORT_SPARE)
    layout = Layout(names=("w",), shapes=((2 * vectors.LONG,),))
    vectors.release()
    held = [vectors.empty(layout.numel) for _ in range(3)]
    del held
    vectors.trim(layout.numel)
    assert vectors.spare_bytes() == spare_bytes(layout) == 4 * layout.numel
    vectors.release()
    assert spare_bytes(layout, parts=4) == layout.numel


def test_no_rank_is_refused():
    spec = RunSpec()
    with pytest.raises(PlanError, match="at least one rank, got 0"):
        needed(spec, bare_model(spec), 2, ranks=0)
