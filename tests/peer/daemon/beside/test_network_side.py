"""Both sides of the seam in one process: what a trainer asks, and what it gets to hear."""

import threading
from collections import deque
from dataclasses import replace

import pytest
import torch

from atoll.coordinator.run.invite import Invite
from atoll.optim.ranks.residuals import RemoteResidual
from atoll.optim.reduction.contribution import WorkRefused
from atoll.optim.state import vectors
from atoll.optim.state.layout import Difference
from atoll.peer.daemon.beside.network_side import options_of
from atoll.peer.daemon.beside.trainer_side import _told
from atoll.peer.daemon.options import LinkRates, PeerOptions
from atoll.peer.errors import NetworkLost
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
    kept.mass_N = torch.ones(3)  # what the ranks have gathered
    assert seat.reducer.state_dict()["feedback"] == [{"mass_N": kept.mass_N}]


def test_what_a_trainer_tells_is_what_the_network_takes(tmp_path):
    invite = Invite(
        addresses=("127.0.0.1:1",), run_id=bytes(32), run_key=bytes(32), tls_sha256=bytes(32)
    )
    options = PeerOptions(
        invite=invite,
        state_dir=tmp_path,
        name="a",
        announce=("/ip4/1.2.3.4/tcp/5",),
        rates=LinkRates(uplink_mbit_s=3.0),
    )
    assert options_of(_told(options, timeout_s=1.0, device="cpu")) == options


def test_a_network_that_is_gone_is_named(seat):
    seat.start()
    seat.line._channel.shut()
    with pytest.raises(NetworkLost, match="closed its channel"):
        seat.reducer.wait()
