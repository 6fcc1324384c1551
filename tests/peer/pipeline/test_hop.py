import random
from dataclasses import replace

import pytest

from atoll.peer.pipeline.actions import (
    AnswerPass,
    Drained,
    MicrobatchEnded,
    RunJob,
    SendPass,
    SettleHeld,
    TakeStep,
    Tell,
)
from atoll.peer.pipeline.hop import Hop
from atoll.peer.pipeline.messages import (
    ACCEPTED,
    KNOWN,
    OmitNote,
    Payload,
    RecountNote,
    SettleNote,
    busy,
    refused,
)
from support.pipelines import (
    GRADIENT,
    OUTPUT,
    ROWS,
    SEQUENCES,
    header,
    hop,
    of,
    pass_key,
    rules,
    the,
)

NAME = {"origin": "a0", "incarnation": "i0", "sequence": 0, "nonce": b"12345678"}


def omit(reason="failed"):
    return OmitNote(**NAME, direction="forward", reason=reason)


def send_in(machine, sequence=0, *, peer="a0", now_s=0.0, stage=1, direction="forward"):
    """Let a peer of the stage before send a microbatch; return the actions."""
    sent = header(sequence, direction, stage=stage)
    first = machine.offered(peer, sent, now_s)
    assert the(AnswerPass, first).answer == ACCEPTED
    return first + machine.received(peer, sent, OUTPUT, now_s)


def send_back(machine, sequence=0, *, peer="c0", now_s=1.0, stage=1, direction="backward"):
    """Let a peer of the next stage return a microbatch; return the actions."""
    sent = header(sequence, direction, path=(peer,), stage=stage)
    first = machine.offered(peer, sent, now_s)
    assert the(AnswerPass, first).answer == ACCEPTED
    return first + machine.received(peer, sent, GRADIENT, now_s)


def handed_over(*, next_peers=("c0",), now_s=0.0, **changes):
    """A middle hop whose output of microbatch 0 was accepted by a peer; and the hand-over."""
    machine, _ = hop(next_peers=next_peers, **changes)
    send_in(machine, now_s=now_s)
    send = the(SendPass, machine.forwarded(pass_key(), OUTPUT, now_s))
    machine.answered(send, ACCEPTED, now_s)
    machine.delivered(send, now_s)
    return machine, send


def returned(**changes):
    """A middle hop that has sent the gradient of microbatch 0 back; and the send."""
    machine, send = handed_over(**changes)
    send_back(machine, peer=send.peer)
    return machine, the(SendPass, machine.gradient_ready(pass_key(), GRADIENT, 1.1))


def come_back(machine, key, now_s=1.0):
    """Let the second stage return a microbatch to its origin; return the actions."""
    name = key.microbatch
    back = header(name.sequence, "backward", stage=0, path=("c0", "b0"), nonce=name.nonce)
    return machine.offered("b0", back, now_s) + machine.received("b0", back, GRADIENT, now_s)


def answer(machine, peer, what, now_s):
    return the(AnswerPass, machine.offered(peer, what, now_s)).answer


# A pass without faults, at each stage.


def test_the_first_stage_draws_sends_and_counts():
    machine, actions = hop(stage=0, next_peers=("b0",), step_microbatches=1)
    begin = the(RunJob, actions)
    assert begin.kind == "begin"
    sent = machine.began(begin.key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.1)
    send = the(SendPass, sent)
    assert send.peer == "b0" and send.header.stage == 1 and send.payload == OUTPUT
    machine.answered(send, ACCEPTED, 0.2)
    name = begin.key.microbatch
    back = header(name.sequence, "backward", stage=0, path=("c0", "b0"), nonce=name.nonce)
    assert answer(machine, "b0", back, 1.0) == ACCEPTED
    job = the(RunJob, machine.received("b0", back, GRADIENT, 1.1))
    assert job.kind == "backward" and job.gradient == GRADIENT.frame
    assert job.tokens == OUTPUT.tokens and job.frame == b""
    done = machine.finished(begin.key, 1.2)
    end = the(MicrobatchEnded, done)
    assert (end.microbatch, end.rows, end.loss, end.omission) == (name, ROWS, 2.5, None)
    assert the(TakeStep, done).microbatches == 1
    assert of(SendPass, done) == []
    machine.drain(1.3)
    machine.job_failed(the(RunJob, done).key, 1.4)  # of the next one, which has begun
    assert machine.statistics().held_bytes == 0


def test_a_middle_stage_returns_the_input_gradient_before_it_counts():
    machine, send = handed_over()
    job = the(RunJob, send_back(machine, peer=send.peer))
    assert job.kind == "backward" and job.frame == OUTPUT.frame and job.tokens == OUTPUT.tokens
    back = the(SendPass, machine.gradient_ready(pass_key(), GRADIENT, 1.1))
    assert back.peer == "a0" and back.header.path == ("c0", "b0") and back.header.loss == 2.5
    assert back.header.stage == 0 and back.payload == GRADIENT
    assert machine.statistics().counted == 0
    machine.finished(pass_key(), 1.2)
    assert machine.statistics().counted == 1 and machine.statistics().in_flight == 0


def test_the_last_stage_turns_a_microbatch_around():
    machine, _ = hop(stage=2)
    job = the(RunJob, send_in(machine, peer="b0", stage=2))
    assert job.kind == "loss" and job.tokens == OUTPUT.tokens
    back = the(SendPass, machine.gradient_ready(pass_key(), GRADIENT, 0.5, loss=3.25))
    assert back.peer == "b0" and back.header.path == ("c0",) and back.header.loss == 3.25
    machine.finished(pass_key(), 0.6)
    assert machine.statistics().counted == 1


def test_an_evaluation_brings_the_loss_back_and_counts_nothing():
    machine, actions = hop(stage=0, next_peers=("b0",), step_microbatches=1, compute_ahead=1)
    machine.began(the(RunJob, actions).key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0)
    key = the(RunJob, machine.evaluate(1, 0.1)).key
    assert key.direction == "evaluate"
    send = the(
        SendPass,
        machine.began(key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.2),
    )
    machine.answered(send, ACCEPTED, 0.3)
    name = key.microbatch
    back = header(name.sequence, "evaluated", stage=0, path=("c0", "b0"), nonce=name.nonce)
    assert answer(machine, "b0", back, 1.0) == ACCEPTED
    end = the(MicrobatchEnded, machine.received("b0", back, Payload.of(b"", b""), 1.1))
    assert end.loss == 2.5 and not end.trains
    assert machine.statistics().evaluated == 1 and machine.statistics().counted == 0


def test_evaluations_pass_through_the_later_stages():
    key = pass_key(0, "evaluate")
    last, _ = hop(stage=2)
    assert the(RunJob, send_in(last, peer="b0", stage=2, direction="evaluate")).kind == "evaluate"
    back = the(SendPass, last.evaluated(key, 4.0, 0.5))
    assert back.header.direction == "evaluated" and back.header.loss == 4.0
    middle, _ = hop()
    send_in(middle, direction="evaluate")
    middle.answered(the(SendPass, middle.forwarded(key, OUTPUT, 0.1)), ACCEPTED, 0.1)
    on = the(SendPass, send_back(middle, direction="evaluated"))
    assert on.header.path == ("c0", "b0") and on.peer == "a0"
    assert middle.statistics().in_flight == 0


def test_only_the_first_stage_begins_evaluations():
    machine, _ = hop()
    with pytest.raises(ValueError, match="stage 0"):
        machine.evaluate(1, 0.0)


# Queues.


def test_what_goes_on_and_what_goes_back_take_turns():
    machine, send = handed_over(compute_ahead=1)
    send_in(machine, 1)  # its forward runs
    send_in(machine, 2)  # theirs wait
    send_in(machine, 3)
    send_back(machine, peer=send.peer)
    actions = machine.forwarded(pass_key(1), OUTPUT, 2.0)
    machine.answered(the(SendPass, actions), ACCEPTED, 2.0)
    send_back(machine, 1, peer=send.peer)
    actions += machine.finished(pass_key(0), 3.0)
    actions += machine.forwarded(pass_key(2), OUTPUT, 4.0)
    assert [(job.kind, job.key) for job in of(RunJob, actions)] == [
        ("backward", pass_key(0)),
        ("forward", pass_key(2)),
        ("backward", pass_key(1)),
    ]


def test_the_first_stage_begins_another_before_the_next_return():
    machine, actions = hop(stage=0, next_peers=("b0",), step_microbatches=4, compute_ahead=1)
    keys = []
    for _ in range(2):
        keys.append(the(RunJob, actions).key)
        actions = machine.began(keys[-1], sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.1)
        machine.answered(the(SendPass, actions), ACCEPTED, 0.2)
    third = the(RunJob, actions)
    actions = [action for key in keys for action in come_back(machine, key)]
    actions += machine.job_failed(third.key, 1.5)
    actions += machine.finished(keys[0], 2.0)
    assert [job.kind for job in of(RunJob, actions)] == ["backward", "begin"]


def test_the_trainer_has_no_more_jobs_than_allowed():
    machine, _ = hop(compute_ahead=2)
    jobs = [job for i in range(4) for job in of(RunJob, send_in(machine, i))]
    assert len(jobs) == 2 and machine.statistics().queued_jobs == 2


def test_the_first_stage_begins_no_more_than_a_step_needs():
    _, actions = hop(stage=0, next_peers=("b0",), step_microbatches=3, compute_ahead=9)
    assert [job.kind for job in of(RunJob, actions)] == ["begin"] * 3


def test_a_drained_hop_says_so_and_steps_when_asked():
    machine, _ = returned()
    actions = machine.drain(1.2)
    assert of(Drained, actions) == []
    machine.finished(pass_key(), 1.3)
    actions = machine.tick(25.0)  # the return was never acknowledged, and its time is over
    assert the(Drained, actions).microbatches == 1
    assert the(TakeStep, machine.flush(25.1)).microbatches == 1
    assert machine.flush(25.2) == []


# Failures on the way on.


def test_a_busy_peer_is_passed_over_for_another():
    machine, _ = hop(next_peers=("c0", "c1"))
    send_in(machine)
    first = the(SendPass, machine.forwarded(pass_key(), OUTPUT, 0.1))
    second = the(SendPass, machine.answered(first, busy(0.5), 0.2))
    assert {first.peer, second.peer} == {"c0", "c1"}
    assert machine.answered(second, busy(0.5), 0.3) == []  # all are busy: it waits
    assert machine.due_s < 1.3
    assert of(SendPass, machine.tick(machine.due_s)) != []


@pytest.mark.parametrize("failure", ["unreachable", "lost", "timed-out"])
def test_a_lost_peer_is_replaced_with_the_kept_output(failure):
    machine, first = handed_over(next_peers=("c0", "c1"))
    second = the(SendPass, machine.send_failed(first, failure, 0.5))
    assert second.peer != first.peer and second.payload == first.payload
    assert second.header.remaining_ms < first.header.remaining_ms
    assert machine.statistics().resends == 1


def test_an_error_of_its_own_omits_and_bans_nobody():
    machine, first = handed_over(next_peers=("c0", "c1"))
    note = the(Tell, machine.send_failed(first, "own", 0.5))
    assert note.peer == "a0" and note.note == omit("failed")
    assert machine.statistics().omitted == {"failed": 1}
    send_in(machine, 1, now_s=0.6)
    send_in(machine, 2, now_s=0.6)
    sends = [the(SendPass, machine.forwarded(pass_key(i), OUTPUT, 0.7)).peer for i in (1, 2)]
    assert sorted(sends) == ["c0", "c1"]


def test_a_silent_peer_is_replaced_before_the_deadline():
    machine, first = handed_over(next_peers=("c0", "c1"), lifetime_s=20.0)
    assert machine.due_s <= 10.0
    second = the(SendPass, machine.tick(machine.due_s))
    assert second.peer != first.peer
    assert second.header.remaining_ms >= 9_900


def test_a_hop_waits_longer_the_more_stages_follow():
    patience = []
    for stage in (3, 2, 1):
        name = "abcde"[stage + 1] + "0"
        machine, _ = hop(stage=stage, stages=5, next_peers=(name,))
        peer = "abcde"[stage - 1] + "0"
        send_in(machine, peer=peer, stage=stage)
        send = the(SendPass, machine.forwarded(pass_key(), OUTPUT, 0.0))
        machine.answered(send, ACCEPTED, 0.0)
        patience.append(machine.due_s)
    assert patience == sorted(patience) and patience[0] < patience[1] < patience[2] < 20


def with_a_usual_return(**changes):
    """A middle hop that knows how long returns take, and the hand-over of microbatch 1 at 1.0 s."""
    machine, first = handed_over(**changes)
    send_back(machine, peer=first.peer, now_s=0.6)
    machine.finished(pass_key(), 0.7)
    send_in(machine, 1, now_s=1.0)
    send = the(SendPass, machine.forwarded(pass_key(1), OUTPUT, 1.0))
    machine.answered(send, ACCEPTED, 1.0)
    return machine, send


def test_a_peer_has_its_time_from_when_it_has_the_output():
    machine, send = with_a_usual_return(lifetime_s=100.0)
    assert machine.due_s > 10.0  # in this peer's own queue nobody is slow
    machine.delivered(send, 5.0)
    assert machine.due_s == pytest.approx(5.0 + 3 * 0.6)


def test_a_peer_that_takes_long_is_asked_and_keeps_the_output():
    machine, send = with_a_usual_return(next_peers=("c0", "c1"), lifetime_s=100.0)
    machine.delivered(send, 1.0)
    for _ in range(2):
        now_s = machine.due_s
        question = the(SendPass, machine.tick(now_s))
        assert question.asks and question.peer == send.peer and question.header.remaining_ms
        assert machine.answered(question, KNOWN, now_s + 0.1) == []
        assert machine.due_s > now_s + 0.1
    assert machine.statistics().resends == 0
    job = the(RunJob, send_back(machine, 1, peer=send.peer, now_s=now_s + 0.2))
    assert job.kind == "backward"


def test_a_peer_that_does_not_answer_a_question_is_replaced():
    machine, send = with_a_usual_return(next_peers=("c0", "c1"), lifetime_s=100.0)
    machine.delivered(send, 1.0)
    question = the(SendPass, machine.tick(machine.due_s))
    again = the(SendPass, machine.send_failed(question, "timed-out", 9.0))
    assert again.peer != send.peer and not again.asks
    assert machine.statistics().resends == 1


def test_a_peer_that_forgot_an_output_gets_it_again():
    machine, send = with_a_usual_return(lifetime_s=100.0)
    machine.delivered(send, 1.0)
    question = the(SendPass, machine.tick(machine.due_s))
    assert question.payload == OUTPUT
    machine.answered(question, ACCEPTED, 4.0)
    assert machine.statistics().resends == 1 and machine.due_s > 10.0
    machine.delivered(question, 4.5)
    assert machine.due_s < 10.0


def test_a_peer_that_only_answers_is_replaced_in_time():
    machine, send = with_a_usual_return(next_peers=("c0", "c1"), lifetime_s=20.0)
    machine.delivered(send, 1.0)
    now_s = 1.0
    while (sent := the(SendPass, machine.tick(machine.due_s))).asks:
        now_s = machine.due_s
        machine.answered(sent, KNOWN, now_s)
    assert sent.peer != send.peer and sent.header.remaining_ms >= 9_900


def test_a_failure_at_a_peer_has_it_asked_for_all_that_it_has():
    machine, send = with_a_usual_return(lifetime_s=100.0)
    machine.delivered(send, 1.0)
    send_in(machine, 2, now_s=1.1)
    other = the(SendPass, machine.forwarded(pass_key(2), OUTPUT, 1.1))
    machine.send_failed(other, "lost", 1.2)
    asked = [each for each in of(SendPass, machine.tick(1.2)) if each.asks]
    assert [each.key for each in asked] == [pass_key(1)]


def test_an_output_waits_for_a_peer_that_never_had_it():
    machine, first = handed_over(next_peers=("c0", "c1"))
    second = the(SendPass, machine.tick(machine.due_s))
    assert machine.answered(second, busy(0.5), 10.1) == []  # not back to the silent one
    third = the(SendPass, machine.tick(machine.due_s))
    assert third.peer == second.peer != first.peer


def test_a_loss_that_is_not_finite_is_refused_before_anything_is_sent():
    machine, _ = hop(stage=2)
    send_in(machine, peer="b0", stage=2)
    with pytest.raises(ValueError, match="finite loss, got nan"):
        machine.gradient_ready(pass_key(), GRADIENT, 0.5, loss=float("nan"))
    assert the(Tell, machine.job_failed(pass_key(), 0.6)).note == omit("failed")


def test_a_peer_that_left_is_replaced_at_once():
    machine, first = handed_over(next_peers=("c0", "c1"))
    assert the(SendPass, machine.left(first.peer, 0.5)).peer != first.peer


def test_a_restarted_peer_gets_the_output_again():
    machine, first = handed_over()
    again = machine.appeared("c0", incarnation="i1", rows_per_s=None, now_s=0.5)
    assert the(SendPass, again).peer == first.peer


def test_a_pass_waits_for_a_vacant_stage_and_goes_to_whoever_fills_it():
    machine, _ = hop(next_peers=())
    send_in(machine)
    assert machine.forwarded(pass_key(), OUTPUT, 0.1) == []
    assert machine.statistics().in_flight == 1
    sends = machine.appeared("c5", incarnation="i0", rows_per_s=None, now_s=9.0)
    assert the(SendPass, sends).peer == "c5"


def test_the_return_of_an_earlier_peer_counts_and_a_second_does_not():
    machine, first = handed_over(next_peers=("c0", "c1"))
    second = the(SendPass, machine.tick(machine.due_s))
    machine.answered(second, ACCEPTED, 10.1)
    send_back(machine, peer=first.peer, now_s=10.2)
    late = machine.offered(second.peer, header(0, "backward", path=(second.peer,)), 10.3)
    assert the(AnswerPass, late).answer == KNOWN
    told = the(Tell, late)
    assert told.peer == "a0" and told.note == RecountNote(**NAME, path=(second.peer,))


def test_a_repeated_return_is_no_second_count():
    machine, send = handed_over()
    send_back(machine, peer=send.peer)
    again = machine.offered(send.peer, header(0, "backward", path=(send.peer,)), 1.1)
    assert the(AnswerPass, again).answer == KNOWN and of(Tell, again) == []


def test_a_peer_that_gives_a_pass_up_is_not_asked_again():
    machine, first = handed_over(next_peers=("c0", "c1"))
    second = the(SendPass, machine.noted(first.peer, omit(), 0.5))
    assert second.peer != first.peer
    machine.answered(second, ACCEPTED, 0.6)
    note = the(Tell, machine.noted(second.peer, omit(), 0.7))
    assert note.note == omit("no-peer") and note.peer == "a0"


def test_a_peer_that_gave_a_pass_up_is_asked_again_after_a_restart():
    machine, first = handed_over(next_peers=("c0", "c1"))
    second = the(SendPass, machine.noted(first.peer, omit(), 0.5))
    assert machine.answered(second, busy(5.0), 0.6) == []
    again = machine.appeared(first.peer, incarnation="i1", rows_per_s=None, now_s=0.7)
    assert the(SendPass, again).peer == first.peer


def test_a_gradient_that_no_job_computes_is_ignored():
    machine, _ = handed_over()
    assert machine.gradient_ready(pass_key(), GRADIENT, 0.5, loss=1.0) == []


def test_word_that_a_pass_is_given_up_counts_from_its_peer_alone():
    machine, _ = handed_over(next_peers=("c0",))
    assert machine.noted("x0", omit(), 0.5) == []
    assert machine.noted("a0", omit(), 0.5) == []
    assert machine.statistics().in_flight == 1


def test_a_peer_of_another_stage_is_forgotten():
    machine, _ = hop(next_peers=("c0",))
    send_in(machine)
    send = the(SendPass, machine.forwarded(pass_key(), OUTPUT, 0.1))
    assert machine.answered(send, refused("stage"), 0.2) == []
    assert machine.statistics().rows_per_s == {}
    assert machine.statistics().in_flight == 1  # it waits for a peer to appear


def test_the_answer_to_a_send_that_was_replaced_changes_nothing():
    machine, first = handed_over(next_peers=("c0", "c1"))
    machine.tick(machine.due_s)
    assert machine.answered(first, busy(0.1), 10.1) == []
    assert machine.send_failed(first, "lost", 10.2) == []
    assert machine.statistics().in_flight == 1


# Failures on the way back, and retries from the stage before.


def test_a_retry_gets_the_cached_return():
    machine, back = returned()
    machine.answered(back, ACCEPTED, 1.2)
    machine.delivered(back, 1.2)
    machine.finished(pass_key(), 1.3)
    again = machine.offered("a0", header(), 2.0)
    assert the(AnswerPass, again).answer == KNOWN
    assert the(SendPass, again).payload == GRADIENT and of(RunJob, again) == []
    assert machine.statistics().counted == 1


def test_a_retry_in_flight_moves_the_return_to_the_new_sender():
    machine, _ = hop(stage=2)
    send_in(machine, peer="b0", stage=2)
    assert answer(machine, "b1", header(stage=2), 0.1) == KNOWN
    back = the(SendPass, machine.gradient_ready(pass_key(), GRADIENT, 0.2, loss=1.0))
    assert back.peer == "b1"
    for tries in range(2):
        machine.send_failed(back, "lost", 0.3 + tries)
        (back,) = of(SendPass, machine.tick(1.2 + tries))
        assert back.peer == "b1"
    assert the(SendPass, machine.send_failed(back, "unreachable", 3.0)).peer == "b0"


def test_a_return_that_nobody_takes_is_told_to_the_origin():
    machine, back = returned()
    told = machine.answered(back, refused("expired"), 1.2)
    assert the(Tell, told).note == RecountNote(**NAME, path=("c0", "b0"))


def test_after_its_deadline_a_pass_is_refused():
    machine, _ = handed_over(lifetime_s=20.0)
    note = the(Tell, machine.tick(20.0))
    assert note.note == omit("late")
    assert answer(machine, "a0", header(), 20.1) == refused("expired")
    late = header(0, "backward", path=("c0",))
    assert answer(machine, "c0", late, 20.1) == refused("expired")
    assert machine.statistics().late_returns == 1 and machine.statistics().held_bytes == 0


def test_gradients_in_computation_at_the_deadline_still_count():
    machine, send = handed_over(lifetime_s=20.0)
    send_back(machine, peer=send.peer, now_s=19.9)
    assert of(Tell, machine.tick(20.0)) == []
    assert of(SendPass, machine.gradient_ready(pass_key(), GRADIENT, 20.1)) == []
    machine.finished(pass_key(), 20.2)
    assert machine.statistics().counted == 1 and machine.statistics().held_bytes == 0


def test_the_origin_hears_of_an_omission_by_itself():
    machine, actions = hop(stage=0, next_peers=(), step_microbatches=1, lifetime_s=20.0)
    key = the(RunJob, actions).key
    machine.began(key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.1)
    actions = machine.tick(20.0)
    end = the(MicrobatchEnded, actions)
    assert (end.omission, end.loss) == ("late", None)
    assert the(RunJob, actions).kind == "begin"  # the step still lacks one


def test_a_job_that_fails_omits_its_pass():
    machine, _ = hop()
    send_in(machine)
    assert the(Tell, machine.job_failed(pass_key(), 0.1)).note == omit("failed")
    assert machine.statistics().in_flight == 0


def test_a_peer_that_withdraws_gives_up_what_is_in_work():
    machine, _ = handed_over()
    actions = machine.withdraw(0.5)
    assert the(Tell, actions).note == omit("withdrawn")
    assert the(Drained, actions).microbatches == 0


def test_names_are_forgotten_in_the_end():
    machine, _ = returned()
    machine.finished(pass_key(), 1.2)
    machine.tick(20.0)
    assert machine.statistics().remembered == 1
    machine.tick(40.0)
    assert machine.statistics().remembered == 0 and machine.due_s == float("inf")


# Settlement.


def test_exact_gradients_wait_for_the_origin():
    machine, _ = returned(exact=True)
    machine.finished(pass_key(), 1.2)
    assert machine.statistics().counted == 0
    assert machine.noted("x0", SettleNote(**NAME), 1.3) == []
    done = machine.noted("a0", SettleNote(**NAME), 1.4)
    assert the(SettleHeld, done).counts
    assert machine.statistics().counted == 1
    assert machine.noted("a0", SettleNote(**NAME), 1.5) == []


def test_a_settlement_may_overtake_the_weights():
    machine, _ = returned(exact=True)
    assert machine.noted("a0", SettleNote(**NAME), 1.15) == []
    assert the(SettleHeld, machine.finished(pass_key(), 1.2)).counts


def test_gradients_that_nobody_settles_are_dropped():
    machine, _ = returned(exact=True, lifetime_s=20.0)
    machine.finished(pass_key(), 1.2)
    machine.tick(20.0)
    assert machine.statistics().in_flight == 1
    assert not the(SettleHeld, machine.tick(25.0)).counts
    assert machine.statistics().counted == 0 and machine.statistics().held_bytes == 0


def test_the_origin_settles_those_on_the_path_until_they_know():
    machine, actions = hop(
        stage=0, next_peers=("b0",), step_microbatches=1, exact=True, compute_ahead=1
    )
    key = the(RunJob, actions).key
    send = the(
        SendPass,
        machine.began(key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.1),
    )
    machine.answered(send, ACCEPTED, 0.2)
    back = header(0, "backward", stage=0, path=("c0", "b0"), nonce=key.microbatch.nonce)
    machine.offered("b0", back, 0.5)
    assert not the(RunJob, machine.received("b0", back, GRADIENT, 0.6)).holds
    tells = of(Tell, machine.finished(key, 0.7))
    assert [tell.peer for tell in tells] == ["c0", "b0"]
    assert all(isinstance(tell.note, SettleNote) for tell in tells)
    machine.told(tells[0], 0.8)
    machine.untold(tells[1], 0.8)
    assert of(Tell, machine.tick(1.2)) == [tells[1]]


def test_the_origin_counts_doubles_by_stage():
    machine, actions = hop(stage=0, next_peers=("b0", "b1"), step_microbatches=1)
    key = the(RunJob, actions).key
    first = the(
        SendPass,
        machine.began(key, sequences=SEQUENCES, rows=ROWS, output=OUTPUT, now_s=0.1),
    )
    machine.answered(first, ACCEPTED, 0.2)
    second = the(SendPass, machine.send_failed(first, "lost", 0.3))
    machine.answered(second, ACCEPTED, 0.4)
    for peer in (second.peer, first.peer, first.peer):
        back = header(0, "backward", stage=0, path=("c0", peer), nonce=key.microbatch.nonce)
        machine.offered(peer, back, 0.5)
        machine.received(peer, back, GRADIENT, 0.5)
    assert {s: n for s, n in machine.statistics().double_counts.items() if n} == {1: 1}
    note = RecountNote(**NAME | {"nonce": key.microbatch.nonce}, path=("c1", first.peer))
    machine.noted("x0", note, 0.6)
    machine.noted("x0", note.model_copy(update={"nonce": b"00000000"}), 0.6)
    assert {s: n for s, n in machine.statistics().double_counts.items() if n} == {1: 1, 2: 1}


# The rest.


def test_waiting_is_counted_by_reason():
    machine, _ = hop(next_peers=())
    machine.tick(2.0)
    send_in(machine, now_s=3.0)
    machine.forwarded(pass_key(), OUTPUT, 4.0)
    send = the(SendPass, machine.appeared("c0", incarnation="i", rows_per_s=None, now_s=6.0))
    machine.answered(send, ACCEPTED, 6.0)
    machine.tick(6.5)
    waited = machine.statistics().waited_s
    assert (waited["input"], waited["route"], waited["returns"]) == (3.0, 2.0, 0.5)


@pytest.mark.parametrize(
    "wrong", [{"stages": 1}, {"stages": 65}, {"lifetime_s": 0.0}, {"max_in_flight": 0}]
)
def test_rules_that_no_hop_can_follow_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        rules(**wrong)


def test_a_stage_beyond_the_last_is_refused():
    with pytest.raises(ValueError, match="below 3, got 3"):
        Hop(me="x", incarnation="i", stage=3, rules=rules(), rng=random.Random(0))


def test_rules_are_values():
    assert replace(rules(), staleness=2).staleness == 2
