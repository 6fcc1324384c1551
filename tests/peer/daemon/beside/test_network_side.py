"""Both sides of the seam in one process: what a trainer asks, and what it gets to hear."""

import queue
import threading
from collections import deque
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.run.invite import Invite
from atoll.optim.ranks.residuals import RemoteResidual
from atoll.optim.reduction.contribution import WorkRefused
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Difference
from atoll.peer.daemon.beside.network_side import options_of
from atoll.peer.daemon.beside.trainer_side import _told
from atoll.peer.daemon.options import LinkRates, PeerOptions
from atoll.peer.daemon.pipeline_run import PipelineRun
from atoll.peer.daemon.views import TrainerView
from atoll.peer.errors import NetworkLost
from atoll.peer.pipeline.actions import RunJob
from atoll.peer.pipeline.messages import Microbatch, PassKey, Payload
from atoll.peer.pipeline.placement import StageNeeds
from atoll.peer.pipeline.workbench import Workbench
from atoll.peer.training.stages import Shape
from support.reducer_bench import ME, NUMEL, contribution, decided

LONG = vectors.LONG


@pytest.fixture
def seat(seats):
    return seats()


def test_a_window_crosses_and_its_commit_comes_back(seat, bench):
    assert torch.equal(seat.start(), torch.zeros(NUMEL))
    window = seat.submit(value=2.0)
    alone = bench()
    alone.start()
    alone.reducer.submit(contribution(value=2.0))
    assert alone.offered.wait(10)
    assert window.offer.frames == alone.offers[-1].offer.frames  # the bits of one process
    seat.bench.deliver(decided(0, ME, settles=window.number, included=[True, True]))
    seat.reducer.wait()
    ((commit, thread),) = seat.commits
    assert (commit.position, commit.counts, thread) == (1, True, threading.current_thread())
    assert torch.equal(commit.params_N, torch.ones(NUMEL)) and seat.reducer.position == 1


def test_a_difference_is_computed_where_it_is_encoded(seat):
    seat.start()
    window = seat.submit(value=2.0)
    own = vectors.empty(LONG + NUMEL)  # in shared memory, of which a part is handed in
    own[:NUMEL], own[LONG:] = 5.0, 3.0
    seat.bench.deliver(decided(0, settles=window.number))
    seat.reducer.wait()
    seat.bench.offered.clear()
    delta = Difference(seat.reducer.fragments[0], own[:NUMEL], own[LONG:])
    seat.reducer.submit(replace(contribution(1), delta=delta))
    assert seat.bench.offered.wait(10)
    again = seat.bench.offers[-1].offer
    assert again.frames == window.offer.frames and again.squares == window.offer.squares


def test_decisions_come_in_their_order_with_the_position_of_each(seat):
    seat.start()
    window = seat.submit()
    positions = []
    seat._settle = lambda commit: positions.append((commit.position, seat.reducer.position))
    seat.reducer._settle = seat._settle
    for position in range(3):
        seat.bench.deliver(decided(position))
    seat.bench.deliver(decided(3, ME, settles=window.number, included=[True, True]))
    seat.reducer.wait()
    assert positions == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_an_error_reaches_the_trainer_as_what_it_was(seat):
    seat.start()
    with pytest.raises(WorkRefused):
        seat.reducer.submit(contribution(steps=0))
    seat.submit()  # and the next one is taken


def test_a_failure_of_the_disk_comes_after_what_was_decided_before(seat):
    seat.start()
    window = seat.submit()
    seat.bench.deliver(decided(0, ME, settles=window.number, included=[True, True]))
    seat.reducer.wait()
    seat.submit()
    seat.bench.decisions.fail(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left") as caught:
        seat.reducer.wait()
    assert caught.value.errno == 28 and len(seat.commits) == 1


def test_a_stop_ends_a_wait_for_a_slow_network(seat):
    seat.start()
    seat.submit()
    threading.Timer(0.2, seat.reducer.stopping.set).start()
    seat.reducer.wait()
    assert seat.commits == []


def test_a_slow_trainer_gets_all_that_was_decided_meanwhile(seat):
    seat.start()
    for position in range(2):
        seat.bench.deliver(decided(position))
    seat.reducer.wait()
    assert [commit.position for commit, _ in seat.commits] == [1, 2]


def test_ranks_keep_the_residuals_and_hear_what_became_of_them(seat):
    ledger = deque()
    kept = RemoteResidual(0, ledger)
    seat.reducer.leave_residuals(lambda fragment: kept)
    seat.start()
    assert seat.reducer.weight_of(0, 100, 10) == seat.bench.reducer.weight_of(0, 100, 10)
    offer = seat.bench.replica.replay.residual(0).offer(torch.ones(NUMEL), 10.0)
    seat.bench.offered.clear()
    seat.reducer.submit(replace(contribution(), delta=offer))
    assert seat.bench.offered.wait(10)
    window = seat.bench.offers[-1]
    assert window.offer.frames == offer.frames
    lost = (slice(5, 7), torch.tensor([0.5, 0.25]))
    seat.bench.deliver(
        decided(0, ME, settles=window.number, included=[True, False], credits=[lost])
    )
    seat.reducer.wait()
    seat.reducer.await_residuals()
    settled, credit = ledger
    assert (settled.kind, settled.included.tolist(), settled.share) == ("settle", [True, False], 10)
    assert (credit.kind, credit.at, credit.values.tolist()) == ("credit", 5, [0.5, 0.25])
    kept.mass = torch.ones(3)  # what the ranks have gathered
    assert seat.reducer.state_dict()["feedback"] == [{"mass_N": kept.mass}]


def test_what_a_trainer_tells_is_what_the_network_takes(tmp_path):
    invite = Invite(
        addresses=("127.0.0.1:1",), run_id=bytes(32), run_key=bytes(32), tls_sha256=bytes(32)
    )
    options = PeerOptions(
        invite=invite,
        state_dir=tmp_path,
        name="a",
        announce=("/ip4/1.2.3.4/tcp/5",),
        rates=LinkRates(uplink_mbit_s=3.0, most_mbit_s=8.0),
    )
    assert options_of(_told(options)) == options


def test_an_event_that_nobody_can_print_ends_the_waits(seat):
    def broken(level, text):
        raise BrokenPipeError("nobody reads")

    seat.start()
    seat.line._on_event = broken
    seat.side._on_event("info", "a word")
    with pytest.raises(BrokenPipeError):
        seat.reducer.wait()


def test_what_the_trainer_shows_reaches_the_heartbeats_to_its_end(seat):
    seat.start()
    views = [TrainerView(step=1)]
    seat.line.show(lambda: views[-1])
    progress = seat.bench.reducer.progress
    seat.reducer.wait()  # asked after the view was sent
    assert progress.view().step == 1
    views.append(TrainerView(step=2, valid_loss=3.0))
    seat.close()
    assert progress.view().valid_loss == 3.0


def test_how_far_the_peer_is_comes_without_a_question(seat):
    seat.start()
    seen = queue.SimpleQueue()
    seat.line.on_view = seen.put
    seat.bench.thread.value.position = 7
    assert seen.get(timeout=10).position == seat.line.view.position == 7
    seat.bench.decisions.fail(OSError(28, "No space left on device"))
    assert isinstance(seen.get(timeout=10).failure, OSError)
    with pytest.raises(OSError, match="No space left"):
        seat.line.expect_working()


def test_a_stages_jobs_and_their_results_cross(seat, monkeypatch):
    run = PipelineRun.__new__(PipelineRun)
    vars(run).update(vars(seat.bench.thread.value.run))
    run.bench, reports = Workbench(), queue.SimpleQueue()
    run.bench.report_to(lambda *report: reports.put(report))
    monkeypatch.setattr(PipelineRun, "is_complete", False)
    monkeypatch.setattr(PipelineRun, "expect_working", lambda run: None)
    monkeypatch.setattr(PipelineRun, "open_stage", lambda *arguments: reports.put(arguments[1:]))
    seat.bench.thread.value.run, seat.bench.thread.value.module = run, "stage-1"
    needs = (StageNeeds(cost=1.0, state_bytes=2, device_bytes=3),)
    shape = Shape(vocab_size=5, seq_len=4, width=3)
    seat.line.ask("open_stage", vars(shape), needs, 9)
    assert reports.get(timeout=10) == (shape, needs, 9)
    key = PassKey(Microbatch("peer", "1" * 32, 4, b"12345678"), "forward")
    job = RunJob(kind="backward", key=key, rows=3, gradient=bytes(1 << 21), loss=2.0)
    run.bench.put(job)
    got = seat.line.bench.take(10)
    assert got == job and type(got.key) is PassKey and got.key.trains
    payload = Payload.of(b"", b"gradient")
    seat.line.bench.report("gradient_ready", key, payload, loss=2.0)
    name, values, named = reports.get(timeout=10)
    assert (name, tuple(values), named) == ("gradient_ready", (key, payload), {"loss": 2.0})
    assert type(values[0]) is PassKey and type(values[1]) is Payload


def test_a_network_that_is_gone_is_named(seat):
    seat.start()
    seat.line._channel.shut()
    with pytest.raises(NetworkLost, match="closed its channel"):
        seat.reducer.wait()
