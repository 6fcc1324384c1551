"""What a peer says about itself."""

from dataclasses import replace
from typing import get_args

import pytest

from atoll.coordinator.run.notice import MAX_TEXT
from atoll.coordinator.run.status import FlowStatus, RoundReport, TimeUse
from atoll.dht.tasks import end
from atoll.dht.testing.memory import run_virtual
from atoll.peer.daemon.options import LinkRates
from atoll.peer.daemon.reporting import MAX_KEPT, MAX_LEFT_OUT, Outbox, Reporter
from atoll.peer.daemon.views import TrainerView
from atoll.peer.pipeline.tallies import HopStatistics
from atoll.peer.training.statistics import TimeSpent
from support.environment import environment, rounds_view, started
from support.swarm import Swarm

VIEW = TrainerView(tokens_per_s=12.5, loss=2.5, device="cpu")


def with_reporter(tmp_path, use, *, position=0, joined=True, view=VIEW, trains=True):
    """Run ``use(reporter, peer)`` with a peer of a swarm of two at that position, or a new one."""

    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = await swarm.start(2)
            await swarm.until(lambda: all(p.replica.position >= position for p in peers))
            for peer in peers:
                await end(*peer.tasks)
            peer = peers[0] if joined else swarm.add()
            env = environment(peer.ctx.me, rates=LinkRates(uplink_mbit_s=50.0))
            reporter = Reporter(
                env,
                peer.replica,
                started(view, has_started=trains),
                rounds_view(peer.rounds, encode_s=0.25),
            )
            reporter.wire, reporter.outbox = env.node.transport.wire, env.outbox
            await use(reporter, peer)
        finally:
            await swarm.stop()

    run_virtual(main())


def test_where_a_peer_stands_and_how_it_trains(tmp_path):
    async def use(reporter, peer):
        status = await reporter.status()
        assert (status.name, status.device, status.loss) == ("ann", "cpu", 2.5)
        assert (status.epoch, status.position) == (1, peer.replica.position)
        assert status.chain == peer.replica.chain.hex()
        assert status.tokens_per_s == 12.5
        assert status.uplink_mbit_s == 50.0
        assert status.phases["encode"] == 0.25

    with_reporter(tmp_path, use, position=3)


def test_the_digest_is_that_of_the_newest_snapshot(tmp_path):
    async def use(reporter, peer):
        status = await reporter.status()
        assert peer.replica.position == status.position == status.state_position
        assert status.state_digest == peer.replica.state.root().hex()

    with_reporter(tmp_path, use, position=4)


def test_between_snapshots_the_digest_stays(tmp_path):
    async def use(reporter, peer):
        assert (await reporter.status()).state_digest == ""
        last = Reporter(
            environment(peer.ctx.me, rounds=peer.replica.position),
            peer.replica,
            started(),
            rounds_view(peer.rounds),
        )
        status = await last.status()
        assert status.state_position == peer.replica.position
        assert status.state_digest == peer.replica.state.root().hex()

    with_reporter(tmp_path, use, position=3)


def test_what_flows_through_a_stage_is_reported(tmp_path):
    hop = HopStatistics(
        counted=7, evaluated=0, steps=1, omitted={"late": 2, "failed": 0},
        late_returns=1, resends=3,
        busy_answers=4, double_counts={0: 0, 1: 2, 2: 1}, waited_s={"input": 1.5, "drain": 0.0},
        in_flight=5, queued_jobs=6, remembered=0, held_bytes=100, rows_per_s={},
    )  # fmt: skip

    async def use(reporter, peer):
        assert (await reporter.status()).flow is None  # a dense run, or no trainer yet
        reporter.watch_flow(lambda: hop)
        assert (await reporter.status()).flow == FlowStatus(
            counted=7,
            in_flight=5,
            queued=6,
            omitted={"late": 2},
            resends=3,
            busy_answers=4,
            late_returns=1,
            double_counts=3,
            held_bytes=100,
            able_tokens_per_s=9.0,
            waited_s={"input": 1.5},
        )

    with_reporter(tmp_path, use, view=replace(VIEW, able_tokens_per_s=9.0))


def test_a_rate_that_is_no_number_is_none(tmp_path):
    async def use(reporter, peer):
        status = await reporter.status()
        assert (status.tokens_per_s, status.utilisation) == (0.0, 0.0)

    broken = TrainerView(tokens_per_s=float("nan"), utilisation=float("inf"))
    with_reporter(tmp_path, use, view=broken)


def test_the_time_of_a_trainer_is_told_apart(tmp_path):
    async def use(reporter, peer):
        shares = (await reporter.status()).time_shares
        some = {"train": 0.9, "wait": 0.0667, "other": 0.0333}
        assert shares == dict.fromkeys(get_args(TimeUse), 0.0) | some

    spent = TimeSpent(total_s=30.0, train_s=27.0, wait_s=2.0)
    with_reporter(tmp_path, use, view=TrainerView(time_shares=spent.shares()))


def test_its_state_says_what_a_peer_is_about(tmp_path):
    async def use(reporter, peer):
        assert (await reporter.status()).state in ("training", "syncing")
        peer.replica.standing = replace(peer.replica.standing, electorate=())
        assert (await reporter.status()).state == "recovering"
        reporter.leaving = True
        assert (await reporter.status()).state == "leaving"

    with_reporter(tmp_path, use)


@pytest.mark.parametrize(("trains", "state"), [(True, "ready"), (False, "joining")])
def test_a_run_begins_with_peers_whose_trainer_has_started(tmp_path, trains, state):
    async def use(reporter, peer):
        await peer.replica.install(await peer.genesis())
        assert (await reporter.status()).state == state

    with_reporter(tmp_path, use, joined=False, trains=trains)


def test_a_peer_without_a_state_is_joining_and_has_no_digest(tmp_path):
    async def use(reporter, peer):
        status = await reporter.status()
        assert (status.state, status.state_digest) == ("joining", "")

    with_reporter(tmp_path, use, joined=False)


def test_a_trace_tells_of_the_round_and_of_the_bytes_since_the_last(tmp_path):
    async def use(reporter, peer):
        before = reporter.wire_bytes()[0]
        settled = [s for s in peer.settled if s.trace is not None]
        for number, each in enumerate(settled[:2]):
            reporter.wire.wire_bytes_sent += 1000 * (number + 1)
            reporter.trace(each)
        first, second = reporter.outbox.traces
        assert (first.position, second.position) == (0, 1)
        assert first.wire_bytes_sent - before >= 1000
        assert second.wire_bytes_sent >= 2000
        assert (first.loss, first.tokens, first.included) == (2.0, 1280, True)
        assert set(first.seconds) == {"wait", "encode", "send", "reduce", "vote", "apply"}

    with_reporter(tmp_path, use, position=2)


def test_a_round_without_us_is_told_without_our_loss(tmp_path):
    async def use(reporter, peer):
        settled = next(s for s in peer.settled if s.trace is not None)
        settled.included = None
        settled.applied.entry.__dict__["members"] = ()
        reporter.trace(settled)
        (trace,) = reporter.outbox.traces
        assert (trace.loss, trace.tokens, trace.included) == (None, 0, False)

    with_reporter(tmp_path, use, position=1)


def test_a_trace_that_leaves_out_thousands_is_short_enough_to_be_taken(tmp_path):
    async def use(reporter, peer):
        settled = next(s for s in peer.settled if s.trace is not None)
        settled.trace.left_out = {f"12D3KooW{n:044d}": "x" * 1000 for n in range(4000)}
        reporter.trace(settled)
        (trace,) = reporter.outbox.traces
        assert RoundReport.from_json(trace.to_json()) == trace
        assert len(trace.left_out) == MAX_LEFT_OUT

    with_reporter(tmp_path, use, position=1)


def test_what_waits_is_bounded():
    outbox = Outbox()
    for number in range(MAX_KEPT + 5):
        outbox.note("warning", f"{number} " + "x" * (2 * MAX_TEXT), -1.0)
    assert len(outbox.events) == MAX_KEPT
    newest = outbox.events[-1]
    assert newest.text.startswith(f"{MAX_KEPT + 4} ")
    assert (len(newest.text), newest.at) == (MAX_TEXT, 0.0)
