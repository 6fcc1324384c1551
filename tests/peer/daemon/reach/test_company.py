"""Which other trainers a peer reaches, and what it does without any."""

import asyncio

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.testing.memory import run_virtual
from atoll.dht.transport import PeerUnreachable, Refused
from atoll.peer.daemon.reach.company import (
    ALONE_S,
    APART_S,
    ASKED_AT_ONCE,
    LOOK_EVERY_S,
    Company,
    asking,
)


class Desk:
    """A company with a clock of its own and peers that answer or not."""

    def __init__(self, needs_others=True):
        self.now_s, self.silent, self.asked, self.shown = 100.0, set(), [], []
        self.company = Company(
            ask=self.ask,
            needs_others=needs_others,
            show=lambda level, text: self.shown.append((level, text)),
            clock=lambda: self.now_s,
        )

    async def ask(self, peer):
        self.asked.append(peer)
        return peer not in self.silent

    def look(self, *trainers, after_s=0.0):
        self.now_s += after_s
        run_virtual(self.company.look(trainers))


def test_work_waits_while_alone_and_goes_out_with_another():
    desk, offered = Desk(), []
    desk.look()
    assert not desk.company.is_alone  # the first look at the roster is empty
    desk.look(after_s=ALONE_S)
    assert desk.company.is_alone
    desk.company.with_others(0, lambda: offered.append("old"))
    desk.company.with_others(0, lambda: offered.append("new"))
    assert offered == []
    desk.look("b")
    assert offered == ["new"]
    desk.company.with_others(0, lambda: offered.append("next"))
    assert offered == ["new", "next"]
    assert [text.split(":")[0] for _, text in desk.shown] == [
        "waiting for peers",
        "another trainer is online; training resumes",
    ]


def test_a_trainer_that_reaches_none_of_those_in_the_roster_is_alone():
    desk = Desk()
    desk.silent.add("b")
    desk.look("b")
    desk.look("b", after_s=ALONE_S)
    assert desk.company.is_alone
    desk.look("b", "c")
    assert not desk.company.is_alone


def test_a_run_of_one_waits_for_nobody():
    desk = Desk(needs_others=False)
    desk.look()
    desk.look(after_s=ALONE_S)
    assert desk.company.reaches_nobody and not desk.company.is_alone and not desk.shown


def test_withdrawn_work_is_not_offered():
    desk = Desk()
    desk.look()
    desk.look(after_s=ALONE_S)
    desk.company.with_others(0, pytest.fail)
    desk.company.withdraw()
    desk.look("b")


def test_a_pair_that_stays_apart_is_named_once_with_the_remedy():
    desk = Desk()
    desk.silent.add("b")
    desk.look("b", "c")
    desk.look("b", "c", after_s=APART_S)
    desk.look("b", "c", after_s=1.0)
    assert desk.company.unreached == ("b",)
    ((level, text),) = desk.shown
    assert level == "warning" and "cannot reach each other" in text and "--announce" in text
    desk.silent.clear()
    desk.look("b", "c")
    assert desk.company.unreached == ()


def test_calls_are_bounded_and_everybody_has_a_turn():
    desk, many = Desk(), [f"p{i}" for i in range(3 * ASKED_AT_ONCE)]
    for _ in range(3):
        desk.asked.clear()
        desk.look(*many, after_s=1.0)
        assert len(desk.asked) == ASKED_AT_ONCE
    assert len(desk.company._asked) == len(many)
    desk.asked.clear()
    desk.look(*many, after_s=1.0)
    assert desk.asked == []


class Line:
    def __init__(self, error=None):
        self.error = error

    async def call(self, peer, method, body, *, timeout_s):
        if self.error is not None:
            raise self.error
        return b""


@pytest.mark.parametrize(
    ("error", "is_reached"),
    [
        (None, True),
        (Refused(RefusalCode.UNKNOWN_METHOD, "an older version"), True),
        (PeerUnreachable("no route"), False),
        (TimeoutError(), False),
    ],
)
def test_a_refusal_is_an_answer_and_silence_is_none(error, is_reached):
    async def main():
        assert await asking(Line(error))("b") is is_reached

    run_virtual(main())


def test_after_a_round_alone_work_waits_until_somebody_answers():
    """With short windows a lone peer would spend many rounds before it is sure."""
    desk, offered = Desk(), []
    desk.look("b")
    desk.company.decided(["me", "b"], "me")
    desk.company.with_others(0, lambda: offered.append(1))
    desk.company.decided(["b"], "me")  # this peer was late
    desk.company.with_others(0, lambda: offered.append(2))
    desk.company.decided(["me"], "me")
    desk.company.with_others(0, lambda: offered.append(3))
    assert offered == [1, 2] and desk.company.is_alone
    desk.silent.add("b")
    desk.look("b", after_s=0.1)
    assert offered == [1, 2] and not desk.shown  # b may answer yet
    desk.silent.clear()
    desk.asked.clear()
    desk.look("b", after_s=0.1)
    assert offered == [1, 2, 3] and desk.asked == ["b"] and not desk.shown


def test_a_peer_whose_last_companion_left_is_alone_at_once():
    desk = Desk()
    desk.look("b")
    desk.look(after_s=0.1)
    assert desk.company.is_alone
    assert [text.split(":")[0] for _, text in desk.shown] == ["waiting for peers"]


def test_the_next_look_comes_at_once_after_a_round_alone_and_else_in_time():
    async def main():
        loop, company = asyncio.get_running_loop(), Desk().company
        began_s = loop.time()
        company.decided(["me"], "me")
        await company.pause()
        assert loop.time() == began_s
        await company.pause()
        assert loop.time() == began_s + LOOK_EVERY_S

    run_virtual(main())
