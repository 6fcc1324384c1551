"""Test gossip rounds over the network in memory: pairs, kept windows and peers left alone."""

import pytest
import torch

from support.crowd import in_crowd, kept, spread


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("fp32", 2),
        ("int8", 3),
        ("fp32", 5),
        *(
            pytest.param(codec, size, marks=pytest.mark.exhaustive)
            for codec, size in (("int8", 2), ("fp32", 3), ("int8", 5), ("fp32", 8), ("int8", 8))
        ),
    ],
)
def test_meetings_keep_the_mean_and_bring_peers_together(size, codec):
    async def use(crowd):
        peers = await crowd.start(size)
        mass, total_N = kept(peers)
        start = spread(peers)
        await crowd.rounds(12)
        after, after_N = kept(peers)
        assert after == mass == size
        assert (after_N - total_N).abs().max() < 1e-5
        assert spread(peers) < start / (4 if size <= 3 else 2)
        # Out of an odd number one is alone in each round, and nobody else ever is.
        alone = sum(s.members == 1 for p in peers for s in p.settled[:12])
        assert alone == (12 if size % 2 else 0)

    in_crowd(use, work=0.0, codec=codec)


def test_two_peers_that_meet_hold_the_formula():
    """Compare three rounds with NoLoCo's rule, computed by hand."""

    async def use(crowd):
        one, two = await crowd.start(2)
        phi = [p.gossip.state.params_N.clone() for p in (one, two)]
        momenta = [torch.zeros_like(x) for x in phi]
        for number in range(3):
            await crowd.until(lambda n=number: all(len(p.settled) == n + 1 for p in (one, two)))
            mean = (one.offered_N + two.offered_N) / 2
            centre = (phi[0] + phi[1]) / 2
            momenta = [
                0.5 * m - 0.7 * mean + 0.7 * (centre - x) for m, x in zip(momenta, phi, strict=True)
            ]
            phi = [x + m for x, m in zip(phi, momenta, strict=True)]
            for peer, x in zip((one, two), phi, strict=True):
                torch.testing.assert_close(peer.gossip.state.params_N, x)

    in_crowd(use)


@pytest.mark.parametrize(
    "windows",
    [
        (5.0, 5.0, 5.0, 10.0),
        pytest.param((4.0, 5.0, 6.0, 7.0, 15.0), marks=pytest.mark.exhaustive),
    ],
)
def test_peers_of_unequal_speed_meet_and_count_the_same_rounds(windows):
    """A slow peer adopts the others' count, and no peer trains without it."""

    async def use(crowd):
        peers = [crowd.add(window_s=window_s) for window_s in windows]
        for peer in peers:
            await peer.start()
        start = spread(peers)
        await crowd.rounds(25)
        positions = [peer.position for peer in peers]
        assert max(positions) - min(positions) <= 3
        for peer in peers:
            assert len(peer.met) > 0.2 * len(peer.settled)
        assert spread(peers) < start / 3
        # Waiting costs the fast ones a part of their time, not half of it.
        assert len(peers[0].settled) > 0.6 * crowd.now() / windows[0]

    in_crowd(use, work=0.0)


def test_a_peer_out_of_step_comes_into_step():
    """Windows of 60 s, a joiner 30 s late, a grace period of 3 s."""

    async def use(crowd):
        peers = await crowd.start(3, window_s=60.0)
        await crowd.rounds(2)
        await crowd.until(lambda: crowd.now() % 60 > 29)
        late = crowd.add(mass=0.0, window_s=60.0)
        await late.start()
        await crowd.rounds(10, [late], timeout_s=1200.0)
        assert len(late.met) >= 6
        assert late.gossip.mass > 0
        assert sum(len(p.met) for p in peers) > 24

    in_crowd(use, work=0.0)


def test_a_run_ends_for_all_at_its_last_round():
    async def use(crowd):
        peers = [crowd.add(window_s=window_s) for window_s in (5.0, 5.0, 12.0)]
        for peer in peers:
            await peer.start()
        await crowd.until(lambda: all(peer.position == 6 for peer in peers), 200)
        await crowd.rounds(1)
        assert {peer.position for peer in peers} == {6}

    in_crowd(use, last_round=6)


def test_a_slow_link_takes_its_time_and_a_declared_pace():
    """2 x 70,000 fp32 values at 2 Mbit/s take 2.3 s, which is not a stall."""

    async def use(crowd):
        one, _ = await crowd.start(2, link_mbit_s=2.0)
        await crowd.rounds(4)
        assert [settled.members for settled in one.settled] == [2] * 4
        trace = one.settled[-1].trace
        assert 2.0 < trace.send_s + trace.reduce_s < 6.0

    in_crowd(use)
