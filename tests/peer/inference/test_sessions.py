"""The ledger of one server, without tensors or clocks."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from atoll.peer.inference.messages import (
    PIECE_BYTES,
    TEXT_PROTOCOL,
    Extend,
    Extended,
    TextShape,
    unpack,
)
from atoll.peer.inference.sessions import Await, ComputeText, SessionRules, Sessions

SHAPE = TextShape(
    is_first=False, is_last=False, width=4, vocab_size=256, num_logits=256, max_rows=32
)
ROW_BYTES = 1000


def rules(**changes):
    fields = {"shape": SHAPE, "cache_bytes": lambda rows: ROW_BYTES * rows}
    return SessionRules(**fields | changes)


def ledger(**changes):
    return Sessions(rules=rules(**changes))


def name(number):
    return number.to_bytes(16)


def question(session=1, start=0, rows=2, *, position=None, max_rows=8, protocol=TEXT_PROTOCOL):
    return Extend(
        protocol=protocol,
        session=name(session),
        position=position,
        start=start,
        rows=rows,
        max_rows=max_rows,
    )


def digest(text="text"):
    return hashlib.sha256(text.encode()).digest()


def asked(sessions, asks, *, client="a", text="text", here=3, now_s=0.0):
    return sessions.asked(client, asks, digest(text), here=here, now_s=now_s)


def answered(sessions, asks, output=b"out", **how):
    """Ask, and compute if that is the verdict; return the answer's record and payload."""
    verdict = asked(sessions, asks, **how)
    if isinstance(verdict, ComputeText):
        verdict = sessions.computed(verdict.session, output, how.get("now_s", 0.0))
    record, payload = unpack(Extended, verdict)
    return record, bytes(payload)


def test_a_text_grows_by_what_is_sent():
    sessions = ledger()
    first = asked(sessions, question(rows=3))
    assert isinstance(first, ComputeText) and first.begins
    sessions.computed(first.session, b"abc", 0.0)
    second = asked(sessions, question(start=3, rows=1), text="more")
    assert isinstance(second, ComputeText) and not second.begins
    record, payload = unpack(Extended, sessions.computed(second.session, b"d", 0.0))
    assert (record.verdict, record.held, record.position) == ("done", 4, 3)
    assert bytes(payload) == b"d"


def test_a_repeat_gets_the_same_answer_without_computing():
    sessions = ledger()
    first = answered(sessions, question(), b"abc")
    assert answered(sessions, question(), b"never") == first
    assert sessions.statistics().rows == 2


def test_a_repeat_while_it_is_computed_waits_for_it():
    sessions = ledger()
    verdict = asked(sessions, question())
    again = asked(sessions, question())
    assert isinstance(again, Await) and again.session is verdict.session
    other = unpack(Extended, asked(sessions, question(start=2), text="other"))[0]
    assert other.verdict == "busy"  # one at a time


def test_a_gap_is_refused_with_what_is_held():
    sessions = ledger()
    answered(sessions, question(rows=3))
    for start in (1, 2, 4):
        record, _ = answered(sessions, question(start=start, rows=1), text="other")
        assert (record.verdict, record.held) == ("gap", 3)
    record, _ = answered(sessions, question(session=9, start=1))
    assert (record.verdict, record.held) == ("gap", 0)


def test_other_content_at_the_same_place_is_no_repeat():
    sessions = ledger()
    answered(sessions, question(rows=3), b"abc")
    verdict = asked(sessions, question(rows=3), text="other")
    assert isinstance(verdict, ComputeText) and verdict.begins  # from the beginning of the text
    sessions.computed(verdict.session, b"xyz", 0.0)
    record, _ = answered(sessions, question(start=3, rows=1), text="more")
    assert (record.verdict, record.held) == ("done", 4)


def test_sessions_of_two_clients_are_two():
    sessions = ledger()
    answered(sessions, question(rows=3), client="a")
    record, _ = answered(sessions, question(start=3, rows=1), client="b")
    assert (record.verdict, record.held) == ("gap", 0)


def test_a_session_reads_the_position_that_it_began_with():
    sessions = ledger()
    answered(sessions, question(), here=3)
    record, _ = answered(sessions, question(start=2), here=4, text="more")
    assert (record.verdict, record.position) == ("done", 3)
    joins, _ = answered(sessions, question(session=2, position=3), here=4)
    assert (joins.verdict, joins.position) == ("done", 3)
    newest, _ = answered(sessions, question(session=3), here=4)
    assert newest.position == 4 and sessions.positions == {3, 4}


def test_a_position_that_is_left_behind_ends_its_sessions():
    sessions = ledger()
    answered(sessions, question(1), here=3)
    answered(sessions, question(2), here=4)
    record, _ = answered(sessions, question(1, start=2, position=3), here=5, text="more")
    assert (record.verdict, record.held) == ("gap", 0) and sessions.positions == {4}
    record, _ = answered(sessions, question(1, position=3), here=5)
    assert (record.verdict, record.position) == ("moved", 5)
    record, _ = answered(sessions, question(2, start=2, position=4), here=5, text="more")
    assert record.verdict == "done"


def test_another_position_than_the_sessions_own_is_not_mixed_in():
    sessions = ledger()
    answered(sessions, question(), here=3)
    record, _ = answered(sessions, question(start=2, position=4), here=4, text="more")
    assert (record.verdict, record.position) == ("moved", 3)


def test_an_idle_session_ends():
    sessions = ledger(idle_s=60.0)
    answered(sessions, question(), now_s=0.0)
    sessions.tick(here=3, now_s=59.0)
    assert len(sessions) == 1
    sessions.tick(here=3, now_s=60.0)
    assert len(sessions) == 0


def test_a_session_that_computes_is_not_idle():
    sessions = ledger(idle_s=60.0)
    asked(sessions, question(), now_s=0.0)
    sessions.tick(here=3, now_s=1000.0)
    assert len(sessions) == 1


def test_a_client_at_its_limit_loses_its_own_oldest():
    sessions = ledger(client_sessions=2, max_sessions=10)
    for second in range(3):
        record, _ = answered(sessions, question(second), now_s=float(second))
        assert record.verdict == "done"
    assert [one.name.session for one in sessions] == [name(1), name(2)]


def test_at_the_limit_of_all_the_longest_idle_goes():
    sessions = ledger(max_sessions=2, grace_s=10.0)
    answered(sessions, question(), client="a", now_s=0.0)
    answered(sessions, question(), client="b", now_s=1.0)
    record, _ = answered(sessions, question(), client="c", now_s=9.0)
    assert record.verdict == "busy" and record.retry_ms > 0  # both are in use
    record, _ = answered(sessions, question(), client="c", now_s=10.5)
    assert record.verdict == "done"
    assert [one.name.client for one in sessions] == ["b", "c"]


def test_one_client_reserves_at_most_its_share():
    answer = max(PIECE_BYTES, 4 * 256)
    sessions = ledger(max_bytes=4 * (answer + 8 * ROW_BYTES), client_sessions=10)
    for number in range(5):
        answered(sessions, question(number), client="hog", now_s=float(number))
    assert len(sessions) == 2
    record, _ = answered(sessions, question(), client="other", now_s=5.0)
    assert record.verdict == "done"


def test_a_session_larger_than_a_share_is_refused_at_once():
    sessions = ledger(max_bytes=PIECE_BYTES)
    record, _ = answered(sessions, question())
    assert (record.verdict, record.reason) == ("refused", "size") and len(sessions) == 0


def test_a_session_does_not_grow_beyond_what_it_reserved():
    sessions = ledger()
    answered(sessions, question(max_rows=4))
    record, _ = answered(sessions, question(start=2, rows=6, max_rows=8), text="more")
    assert (record.verdict, record.reason) == ("refused", "shape")


def test_computations_that_wait_are_bounded():
    sessions = ledger(max_waiting=2)
    assert isinstance(asked(sessions, question(), client="a"), ComputeText)
    assert isinstance(asked(sessions, question(), client="b"), ComputeText)
    record, _ = answered(sessions, question(), client="c")
    assert record.verdict == "busy" and len(sessions) == 2
    assert sessions.statistics().busy == 1


def test_a_failure_ends_the_session_alone():
    sessions = ledger()
    answered(sessions, question(2))
    verdict = asked(sessions, question(1))
    record, _ = unpack(Extended, sessions.failed(verdict.session, "failed"))
    assert (record.verdict, record.reason) == ("refused", "failed")
    assert [one.name.session for one in sessions] == [name(2)]


def test_an_answer_that_comes_after_its_session_ended_is_still_one():
    sessions = ledger()
    verdict = asked(sessions, question(1), here=3)
    answered(sessions, question(2), here=4)
    sessions.tick(here=5, now_s=0.0)
    record, payload = unpack(Extended, sessions.computed(verdict.session, b"abc", 0.0))
    assert (record.verdict, bytes(payload)) == ("done", b"abc")
    assert 3 not in sessions.positions


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.data())
def test_any_order_of_repeats_gives_the_answers_of_one_pass(pieces, data):
    """Each question may be repeated while it is the last one; old ones change nothing."""
    sessions, start, past = ledger(), 0, []
    for number, rows in enumerate(pieces):
        asks = question(start=start, rows=rows, max_rows=24)
        output = f"out {number}".encode()
        expected = answered(sessions, asks, output, text=str(number))
        assert expected[0].verdict == "done"
        for _ in range(data.draw(st.integers(0, 2))):
            assert answered(sessions, asks, b"never", text=str(number)) == expected
        for old, text in data.draw(st.lists(st.sampled_from(past), max_size=2)) if past else []:
            record, _ = answered(sessions, old, b"never", text=text)
            assert (record.verdict, record.held) == ("gap", start + rows)
        if start:  # the first one begins the text again, as it may
            past.append((asks, str(number)))
        start += rows


class Ledger(RuleBasedStateMachine):
    """Clients that ask for anything, and a log that moves on: the bounds hold."""

    RULES = rules(
        max_sessions=4,
        client_sessions=2,
        max_bytes=6 * (PIECE_BYTES + 8 * ROW_BYTES),
        idle_s=30.0,
        grace_s=5.0,
        max_waiting=3,
    )

    def __init__(self):
        super().__init__()
        self.sessions = Sessions(rules=self.RULES)
        self.now_s, self.here = 0.0, 3
        self.working = []

    @rule(
        client=st.sampled_from("abc"),
        session=st.integers(0, 3),
        start=st.integers(0, 6),
        rows=st.integers(1, 4),
        max_rows=st.integers(1, 40),
        position=st.one_of(st.none(), st.integers(0, 6)),
        text=st.sampled_from("xy"),
    )
    def ask(self, client, session, start, rows, max_rows, position, text):
        asks = question(session, start, rows, position=position, max_rows=max_rows)
        verdict = asked(
            self.sessions, asks, client=client, text=text, here=self.here, now_s=self.now_s
        )
        if isinstance(verdict, ComputeText):
            one = verdict.session
            assert one.name == (client, name(session))
            assert start in (0, one.held) and start + rows <= one.max_rows <= SHAPE.max_rows
            assert verdict.begins == (start == 0)
            assert position in (None, one.position)
            assert all(one is not other for other in self.working)
            self.working.append(one)
        elif isinstance(verdict, bytes):
            record, _ = unpack(Extended, verdict)
            if record.verdict == "done":
                assert record.held == start + rows

    @rule(data=st.data(), works=st.booleans())
    def end(self, data, works):
        if self.working:
            one = self.working.pop(data.draw(st.integers(0, len(self.working) - 1)))
            if works:
                self.sessions.computed(one, b"out", self.now_s)
            else:
                self.sessions.failed(one, "failed")

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.now_s += seconds
        self.sessions.tick(here=self.here, now_s=self.now_s)

    @rule(by=st.integers(1, 2))
    def move(self, by):
        self.here += by
        self.sessions.tick(here=self.here, now_s=self.now_s)

    @invariant()
    def bounds_hold(self):
        found = list(self.sessions)
        assert len(found) <= self.RULES.max_sessions
        assert sum(one.num_bytes for one in found) <= self.RULES.max_bytes
        assert sum(one.in_work is not None for one in found) <= self.RULES.max_waiting
        for client in "abc":
            own = [one for one in found if one.name.client == client]
            assert len(own) <= self.RULES.client_sessions
            assert 2 * sum(one.num_bytes for one in own) <= self.RULES.max_bytes
        assert len(self.sessions.positions - {self.here}) <= 1  # at most one spare copy


def test_bounds_hold_whatever_clients_ask():
    run_state_machine_as_test(Ledger)


@pytest.mark.parametrize("reason", ["protocol", "shape"])
def test_a_question_that_does_not_fit_begins_nothing(reason):
    sessions = ledger()
    wrong = {"protocol": {"protocol": 99}, "shape": {"rows": 9}}[reason]
    record, _ = answered(sessions, question(**wrong))
    assert (record.verdict, record.reason) == ("refused", reason) and len(sessions) == 0
