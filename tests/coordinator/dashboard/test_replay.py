"""A replay, and the parts of the screen that it shares with a live run."""

import asyncio
from dataclasses import replace

import pytest

from atoll.coordinator.dashboard.arranging import Arrangement
from atoll.coordinator.dashboard.losses import loss_curve
from atoll.coordinator.dashboard.panes import LossPane, PeersPane, RunHeader
from atoll.coordinator.dashboard.replay import ReplayApp, ScrubBar
from atoll.coordinator.dashboard.tape import Tape, Thrift
from atoll.coordinator.report.mine import find_peer, mine
from atoll.coordinator.run.status import LossPoint, PeerShare
from support.status import START, make_status, peer_id


class Archive:
    """A run that has ended."""

    def __init__(self, total):
        self.total = total
        self.asked = []

    async def now(self):
        return make_status(self.total)

    async def at(self, position):
        self.asked.append(position)
        return make_status(position)


def with_replay(check, *, total=40, **options):
    archive = Archive(total)
    app = ReplayApp(archive, make_status(total), interval_s=None, **options)

    async def main():
        async with app.run_test(size=(130, 44)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await check(app, archive, pilot)

    asyncio.run(main())


async def press(app, pilot, *keys):
    await pilot.press(*keys)
    await app.workers.wait_for_complete()
    await pilot.pause()


def test_keys_step_and_jump_through_the_run():
    async def check(app, archive, pilot):
        assert "round 12/40" in app.query_one(ScrubBar).render().plain
        await press(app, pilot, "full_stop")
        assert "round 13/120" in app.query_one(RunHeader).render().plain
        await press(app, pilot, "less_than_sign", "comma")
        assert app.tape.position == 2
        await press(app, pilot, "colon", *"50%", "enter")
        assert app.view.status.position == 20
        assert "‖ replay" in app.query_one(RunHeader).render().plain
        await press(app, pilot, "colon", *"-5", "escape")
        assert app.tape.position == 20

    with_replay(check, first=12)


def test_a_click_on_the_bar_goes_there():
    async def check(app, archive, pilot):
        bar = app.query_one(ScrubBar)
        line = bar.render().plain
        first = min(line.index("━") if "━" in line else 999, line.index("●"))
        await pilot.click(ScrubBar, offset=(first + bar._bar[1] - 1, 0))
        await app.workers.wait_for_complete()
        assert app.tape.position == app.tape.total

    with_replay(check)


def test_a_tape_plays_to_the_end_and_from_the_start_again():
    tape = Tape(total=10, speed=5.0, is_playing=True)
    tape.advance(1.1)
    assert (tape.position, tape.is_playing) == (5, True)
    tape.advance(10.0)
    assert (tape.position, tape.is_playing) == (10, False)
    tape.toggle()
    assert (tape.position, tape.is_playing) == (0, True)
    tape.change_speed(-99)
    assert tape.speed == 0.5


@pytest.mark.parametrize(
    ("told", "position"),
    [("7", 7), ("40%", 40), ("+10", 60), ("-5%", 45), ("99999", 100), (" 1 2 ", 12)],
)
def test_a_jump_goes_where_the_text_says(told, position):
    tape = Tape(total=100, at=50.0)
    assert tape.jump(told)
    assert tape.position == position


@pytest.mark.parametrize("told", ["", "x", "1e9", "nan", "--3", "%"])
def test_a_jump_to_nowhere_is_refused(told):
    tape = Tape(total=100, at=50.0)
    assert not tape.jump(told)
    assert tape.position == 50


def given(status):
    rows = [
        PeerShare(peer_id=p.peer_id, tokens=(i + 1) * 100, rounds=i + 1, missed=4 - i)
        for i, p in enumerate(status.peers)
    ]
    return replace(status, contributions=rows)


def test_my_peer_has_its_share_and_its_rank():
    status = given(make_status(5))
    me = mine(status, peer_id(3))
    assert (me.rank, me.num_ranked, me.rounds, me.missed) == (2, 5, 4, 1)
    assert me.share == pytest.approx(400 / 1500)
    assert mine(status, "12D3KooWnobody").rank == 0


def test_a_peer_is_found_by_name_identity_or_end():
    status = make_status(5)
    assert find_peer(status, "drift") == peer_id(2)
    assert find_peer(status, peer_id(2)[-8:]) == peer_id(2)
    assert find_peer(status, peer_id(77)) == peer_id(77)  # it may still come
    twice = replace(status, peers=[replace(p, name="same") for p in status.peers])
    assert (find_peer(twice, "same"), find_peer(status, "nobody")) == ("", "")


def test_the_screen_shows_my_peer():
    async def check(app, archive, pilot):
        assert "my peer coral  " in app.query_one(RunHeader).render().plain
        assert "◆ coral" in app.query_one(PeersPane).render().plain

    with_replay(check, first=5, me="coral")


def test_peers_are_sorted_by_numbers_that_are_known():
    peers = list(given(make_status(5)).peers)
    by = Arrangement().next_order()
    assert by.order == "tokens"
    rows = by.rows(peers, {peers[1].peer_id: 9, peers[4].peer_id: 3})
    assert [peers.index(row) for row in rows] == [1, 4, 0, 2, 3]
    unknown = [replace(peers[0], loss=None), *peers[1:]]
    for is_reversed in (False, True):
        losses = Arrangement(order="loss", is_reversed=is_reversed).rows(unknown, {})
        assert losses[-1].loss is None
        known = [row.loss for row in losses[:-1]]
        assert known == sorted(known, reverse=is_reversed)


def test_a_filter_keeps_the_peers_with_the_text():
    async def check(app, archive, pilot):
        await press(app, pilot, "slash", *"CORA")
        assert [row.name for row in app.query_one(PeersPane).rows()] == ["coral"]
        await press(app, pilot, "enter")
        assert 'with "CORA"' in app.query_one(PeersPane).border_subtitle
        await press(app, pilot, "slash", "escape")
        assert len(app.query_one(PeersPane).rows()) == 5

    with_replay(check, first=5)


def test_a_key_draws_the_loss_by_time_and_by_tokens():
    async def check(app, archive, pilot):
        names = []
        for _ in range(3):
            names.append(app.query_one(LossPane).border_subtitle)
            await press(app, pilot, "x")
        assert ["by rounds" in names[0], "by minutes" in names[1], "by tokens" in names[2]] == [
            True
        ] * 3

    with_replay(check, first=20)


def test_the_curve_has_all_rounds_at_their_tokens():
    status = make_status(40)
    early = LossPoint(position=8, at=START + 8 * 18, tokens=8 * 5 * 61_440, loss=2.0)
    status = replace(status, earlier=[early], history=status.history[8:])
    xs = [x for x, _ in loss_curve(status, "tokens").training]
    assert xs[:2] == [early.tokens, early.tokens + 5 * 61_440]
    assert xs[-1] == status.tokens_total
    late = replace(status.history[-1], late=True)
    timed = loss_curve(replace(status, history=[*status.history[:-1], late]), "time")
    assert len(timed.training) == len(xs) - 1
    assert timed.unit == "minutes"


def test_a_screen_waits_until_the_one_before_is_paid_for():
    thrift = Thrift(share=0.1)
    assert thrift.allows(0.0, 5.0)  # the start costs what it costs
    assert not thrift.allows(0.4, 5.05)
    assert thrift.allows(0.5, 5.05)
    assert thrift.allows(0.6, 5.06)
    assert not thrift.allows(0.61, 5.065)
    assert thrift.allows(2.61, 50.0)  # what keys have cost stops no replay
