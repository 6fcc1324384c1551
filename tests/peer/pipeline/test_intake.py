"""What a lying neighbour may try when a peer answers headers."""

import pytest

from atoll.peer.pipeline.actions import AnswerPass, RunJob, SendPass, TakeStep
from atoll.peer.pipeline.messages import ACCEPTED, KNOWN, MAX_RETRY_MS, refused
from support.pipelines import GRADIENT, OUTPUT, ROWS, header, hop, of, pass_key, the


def answer(machine, peer, what, now_s=0.0):
    return the(AnswerPass, machine.offered(peer, what, now_s)).answer


def awaited(**changes):
    """A middle hop that has handed microbatch 0 over to c0."""
    machine, _ = hop(**changes)
    assert answer(machine, "a0", header()) == ACCEPTED
    machine.received("a0", header(), OUTPUT, 0.1)
    send = the(SendPass, machine.forwarded(pass_key(), OUTPUT, 0.2))
    machine.answered(send, ACCEPTED, 0.3)
    return machine


def back(peer="c0", **changes):
    return header(0, "backward", **{"path": (peer,)} | changes)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"protocol": 99}, "protocol"),
        ({"stage": 2}, "stage"),
        ({"rows": 7}, "shape"),
        ({"width": 9}, "shape"),
        ({"codec": "fp32"}, "shape"),
        ({"origin": "a1"}, "origin"),
    ],
)
def test_what_does_not_fit_is_refused_by_reason(wrong, reason):
    machine, _ = hop()
    assert answer(machine, "a0", header(**wrong)) == refused(reason)
    assert machine.statistics().held_bytes == 0


def test_the_first_stage_takes_no_forward():
    machine, _ = hop(stage=0, next_peers=("b0",))
    assert answer(machine, "b0", header(stage=0)) == refused("stage")


def test_a_later_stage_takes_any_origin_from_its_sender():
    machine, _ = hop(stage=2)
    assert answer(machine, "b0", header(stage=2)) == ACCEPTED


def test_a_return_that_nobody_asked_for_is_refused():
    machine, _ = hop()
    assert answer(machine, "c0", back()) == refused("not-asked")


def test_a_return_from_a_stranger_is_refused():
    assert answer(awaited(), "x0", back("x0")) == refused("not-asked")


def test_a_return_under_a_guessed_name_is_refused():
    assert answer(awaited(), "c0", back(nonce=b"00000000")) == refused("not-asked")


@pytest.mark.parametrize("path", [("x0",), ("c0", "c0"), ("c0", "x0")])
def test_a_return_with_a_path_of_another_form_is_refused(path):
    assert answer(awaited(), "c0", back(path=path)) == refused("shape")


def test_a_return_of_other_rows_is_refused():
    assert answer(awaited(), "c0", back(rows=ROWS - 2)) == refused("shape")


def test_a_payload_from_another_peer_than_it_was_accepted_from_is_ignored():
    machine, _ = hop()
    answer(machine, "a0", header())
    assert of(RunJob, machine.received("x0", header(), OUTPUT, 0.1)) == []
    machine = awaited()
    assert answer(machine, "c0", back()) == ACCEPTED
    assert of(RunJob, machine.received("x0", back(), GRADIENT, 0.4)) == []
    assert the(RunJob, machine.received("c0", back(), GRADIENT, 0.5)).kind == "backward"


def test_a_pass_whose_payload_is_on_the_way_is_not_taken_twice():
    machine, _ = hop()
    assert answer(machine, "a0", header()) == ACCEPTED
    assert answer(machine, "a0", header()).verdict == "busy"
    machine = awaited()
    assert answer(machine, "c0", back()) == ACCEPTED
    assert answer(machine, "c0", back()).verdict == "busy"


def test_a_return_that_is_begun_and_not_completed_is_cut_off():
    machine = awaited(next_peers=("c0", "c1"), lifetime_s=20.0)
    machine.tick(machine.due_s)  # 10 s: the one that took it is silent, and the other is asked
    asked = [peer for peer in ("c0", "c1") if answer(machine, peer, back(peer), 10.0) == ACCEPTED]
    assert len(asked) == 1
    (other,) = {"c0", "c1"} - set(asked)
    assert answer(machine, other, back(other), 14.9).verdict == "busy"
    machine.tick(15.1)
    assert answer(machine, asked[0], back(asked[0]), 15.2) == refused("not-asked")
    assert answer(machine, other, back(other), 15.2) == ACCEPTED


def test_the_only_peer_is_asked_again_for_a_return_that_stalled():
    machine = awaited(next_peers=("c0",), lifetime_s=20.0)
    assert answer(machine, "c0", back(), 6.0) == ACCEPTED
    machine.tick(10.2)  # its patience is over, but the return is arriving
    again = the(SendPass, machine.tick(11.1))
    assert again.peer == "c0"
    machine.answered(again, KNOWN, 11.2)
    assert answer(machine, "c0", back(), 11.3) == ACCEPTED
    assert the(RunJob, machine.received("c0", back(), GRADIENT, 11.4)).kind == "backward"


def test_a_return_may_overtake_the_answer():
    machine, _ = hop()
    answer(machine, "a0", header())
    machine.received("a0", header(), OUTPUT, 0.1)
    send = the(SendPass, machine.forwarded(pass_key(), OUTPUT, 0.2))
    assert answer(machine, send.peer, back()) == ACCEPTED


def test_a_sender_that_delivers_nothing_waits_before_the_next():
    machine, _ = hop(lifetime_s=20.0)
    answer(machine, "a0", header())
    machine.tick(5.0)  # a quarter of the lifetime
    assert machine.statistics().held_bytes == 0
    assert answer(machine, "a0", header(1), 5.1).verdict == "busy"
    assert answer(machine, "a1", header(1, origin="a1"), 5.1) == ACCEPTED
    assert answer(machine, "a0", header(0), 7.0) == ACCEPTED  # nothing of it was computed


def test_a_lifetime_beyond_the_run_is_cut():
    machine, _ = hop(lifetime_s=20.0)
    answer(machine, "a0", header(remaining_ms=3_600_000))
    machine.received("a0", header(), OUTPUT, 0.1)
    machine.tick(20.0)
    assert machine.statistics().omitted == {"late": 1}


def test_one_sender_fills_half_of_the_memory_at_most():
    size = 138  # of a pass in these shapes, at most
    machine, _ = hop(stage=2, max_bytes=8 * size, step_microbatches=100, max_in_flight=100)
    took = [answer(machine, "liar", header(i, stage=2, origin=f"o{i}")) for i in range(8)]
    accepted = took.count(ACCEPTED)
    assert 0 < accepted < 8 and took[-1].verdict == "busy"
    assert answer(machine, "b1", header(stage=2, origin="a9")) == ACCEPTED


def test_more_than_the_queue_holds_is_answered_with_busy():
    machine, _ = hop(stage=2, max_in_flight=2, step_microbatches=100)
    took = [answer(machine, "b0", header(i, stage=2)) for i in range(3)]
    assert took[:2] == [ACCEPTED] * 2
    assert took[2].verdict == "busy" and 0 < took[2].retry_ms < MAX_RETRY_MS
    assert machine.statistics().busy_answers == 1


def test_a_peer_that_drains_is_busy_and_still_takes_returns():
    machine = awaited()
    machine.drain(0.4)
    assert answer(machine, "a0", header(1), 0.5).verdict == "busy"
    assert answer(machine, "c0", back(), 0.5) == ACCEPTED


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_staleness_no_microbatch_waits_for_a_round(staleness):
    """The others of the stage may lack it for that very round."""
    machine, _ = hop(stage=2, step_microbatches=1, staleness=staleness)
    assert answer(machine, "b0", header(stage=2)) == ACCEPTED
    machine.received("b0", header(stage=2), OUTPUT, 0.1)
    machine.gradient_ready(pass_key(), GRADIENT, 0.2, loss=2.5)
    the(TakeStep, machine.finished(pass_key(), 0.3))
    verdict = answer(machine, "b0", header(1, stage=2), 0.4).verdict
    assert verdict == ("accepted" if staleness else "busy")
    assert answer(machine, "b0", header(2, "evaluate", stage=2), 0.5) == ACCEPTED
    machine.stepped(0.6)
    assert answer(machine, "b0", header(3, stage=2), 0.7) == ACCEPTED
