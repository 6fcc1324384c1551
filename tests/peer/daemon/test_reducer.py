"""The networked reducer between two threads: what is offered, and what comes back of it."""

import errno
import math
import threading
import time
import types

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.coordinator.run.spec import RunSpec
from atoll.optim import DiLoCo
from atoll.optim.log.live_replica import Applied
from atoll.optim.log.orders import RunSettings
from atoll.optim.reducer import Course
from atoll.optim.reduction.contribution import Feedback, WorkRefused
from atoll.optim.state import fragments as cuts
from atoll.optim.state.layout import CELL, Layout, LayoutError
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon import reducer, views
from atoll.peer.daemon.decisions import Reset
from atoll.peer.daemon.reducer import FAR_BEHIND
from atoll.peer.rounds.engine import Settled
from support.reducer_bench import (
    LAYOUT,
    ME,
    NORM,
    NUMEL,
    OTHER,
    SPEC,
    TWO_ROUNDS,
    contribution,
    decided,
    entry,
    keep_entries,
    state,
)


def test_the_parameters_come_from_the_run(bench):
    assert bench(position=3).start().unique().tolist() == [3.0]


def test_another_model_is_refused(bench):
    other = Layout(names=("w",), shapes=((3,),))
    with pytest.raises(LayoutError, match="expected the run's model"):
        bench().reducer.start(other, torch.zeros(3), lambda commit: None)


def test_another_model_of_equal_size_names_the_first_parameter(bench):
    other = Layout(names=("v",), shapes=((NUMEL,),))
    with pytest.raises(LayoutError, match=r"differs: v \[\d+\] instead of w .*build_model\(\)"):
        bench().reducer.start(other, torch.zeros(NUMEL), lambda commit: None)


def test_a_contribution_is_offered_with_its_weight(bench):
    each = bench()
    each.start()
    window = each.submit(tokens=100, steps=10, loss=2.5)
    assert (window.number, window.tokens, window.steps, window.loss) == (1, 100, 10, 2.5)
    assert window.offer.weight == 10.0
    assert each.submit(1).number == 2


def test_the_trainer_goes_on_while_its_contribution_is_encoded(bench, monkeypatch):
    """An entry that is decided meanwhile leaves the residual alone until the codec has read it."""
    each, go_on, encode = bench(), threading.Event(), Feedback.offer

    def slow(*arguments):
        assert go_on.wait(10)
        return encode(*arguments)

    monkeypatch.setattr(Feedback, "offer", slow)
    each.start()
    assert not each.reducer.progress.hands_in
    each.reducer.submit(contribution())
    assert each.reducer.progress.hands_in
    assert each.offers == []
    each.deliver(decided(0, OTHER, credits=[(slice(0, 1), torch.tensor([3.0]))]))
    waiting = threading.Thread(target=each.reducer.wait)
    waiting.start()
    waiting.join(0.1)
    assert each.reducer.position == 1
    assert float(each.reducer._residuals[0].mass_N[0]) == 0.0
    go_on.set()
    assert each.offered.wait(10)
    each.let_loop_catch_up()
    assert not each.reducer.progress.hands_in
    each.deliver(decided(1, ME, settles=1, included=[True] * 2))
    waiting.join(10)
    assert [commit.position for commit in each.commits] == [1, 2]
    assert float(each.residual()[0]) == 3.0


def test_the_trainer_goes_on_while_its_residual_is_settled(bench, monkeypatch):
    """What is saved, and what is offered next, holds the settlement nevertheless."""
    each, go_on, credit = bench(), threading.Event(), Feedback.owner_credit

    def slow(*arguments):
        assert go_on.wait(10)
        credit(*arguments)

    monkeypatch.setattr(Feedback, "owner_credit", slow)
    each.start()
    number = each.submit().number
    credits = [(slice(0, 1), torch.tensor([3.0]))]
    each.deliver(decided(0, ME, settles=number, included=[True] * 2, credits=credits))
    each.reducer.wait()
    assert [commit.position for commit in each.commits] == [1]
    each.reducer.submit(contribution(1))
    threading.Timer(0.1, go_on.set).start()
    assert float(each.residual()[0]) == 3.0
    frames = each.reducer._offers[0].offer.frames
    assert float(SPEC.method().codec.decode(frames[0], CELL)[0]) == pytest.approx(1.3)


def test_a_settlement_that_fails_is_raised(bench, monkeypatch):
    each = bench(patience_s=0.3)
    each.start()

    def broken(*arguments):
        raise ValueError("no such part")

    monkeypatch.setattr(Feedback, "owner_credit", broken)
    credits = [(slice(0, 1), torch.tensor([3.0]))]
    each.deliver(decided(0, OTHER, credits=credits))
    each.reducer.wait()
    with pytest.raises(ValueError, match="no such part"):
        each.residual()


def test_entries_that_come_after_the_end_still_settle_the_residual(bench):
    each = bench()
    each.start()
    each.reducer.close()
    each.deliver(decided(0, OTHER, credits=[(slice(0, 1), torch.tensor([3.0]))]))
    each.reducer.wait()
    assert float(each.residual()[0]) == 3.0


def test_a_trainer_that_waits_learns_that_the_disk_is_full(bench):
    each = bench()
    each.start()
    each.submit()
    full = OSError(errno.ENOSPC, "No space left on device")
    threading.Timer(0.1, each.decisions.fail, [full]).start()
    with pytest.raises(OSError, match="No space left"):
        each.reducer.wait()


def test_what_a_codec_refuses_is_raised_by_the_wait(bench):
    each = bench()
    each.start()
    each.reducer.submit(contribution(value=math.nan))
    with pytest.raises(CodecError, match="finite"):
        each.reducer.wait()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_unknown_loss_is_none_not_zero(bench, loss):
    each = bench()
    each.start()
    assert each.submit(loss=loss).loss is None


def test_absurd_work_is_refused(bench):
    each = bench()
    each.start()
    with pytest.raises(WorkRefused):
        each.reducer.submit(contribution(tokens=-1))
    assert each.offers == []


def test_the_first_window_of_a_joiner_weighs_nothing(bench):
    each = bench(position=5)
    each.start()
    assert [each.submit(i).offer.weight for i in range(2)] == [0.0, 10.0]
    assert sum("weight 0" in text for text in each.said) == 1


def test_an_entry_with_my_contribution_settles_it(bench):
    each = bench()
    each.start()
    window = each.submit()
    each.deliver(decided(0, ME, OTHER, settles=window.number, included=[True, False]))
    each.reducer.wait()
    (commit,) = each.commits
    assert (commit.position, commit.members, commit.settles) == (1, 2, True)
    assert commit.included.tolist() == [True, False]
    assert commit.params_N.unique().tolist() == [1.0]


def test_an_entry_without_my_contribution_settles_it_too(bench):
    each = bench()
    each.start()
    window = each.submit()
    each.deliver(decided(0, OTHER, settles=window.number))
    each.reducer.wait()
    assert each.commits[0].included is None
    assert each.commits[0].settles


def test_an_earlier_entry_settles_nothing(bench):
    each = bench(patience_s=0.3)
    each.start()
    each.submit()
    each.deliver(decided(0, OTHER, settles=None))
    each.reducer.wait()  # returns for its deadline, not for this entry
    assert [(c.position, c.settles) for c in each.commits] == [(1, False)]
    each.deliver(decided(1, ME, settles=1, included=[True, True]))
    each.reducer.wait()
    assert [(c.position, c.settles) for c in each.commits] == [(1, False), (2, True)]


def test_entries_are_settled_in_order_on_the_callers_thread(bench):
    each = bench()
    threads = []
    each.reducer.start(LAYOUT, torch.zeros(NUMEL), lambda c: threads.append(threading.get_ident()))
    each.submit()
    for position, settles in enumerate([None, None, 1]):
        each.thread.post(each.deliver, decided(position, settles=settles))
    each.reducer.wait()
    assert threads == [threading.get_ident()] * 3


def test_a_wait_ends_when_the_peer_stops(bench):
    each = bench()
    each.start()
    each.submit()
    threading.Timer(0.1, each.reducer.stopping.set).start()
    each.reducer.wait()
    assert each.commits == []


def test_a_wait_ends_with_the_run(bench):
    """A peer that was left out of the last round learns of it when it offers."""
    each = bench(spec=TWO_ROUNDS)
    each.start()
    each.submit()
    for position in range(2):
        each.deliver(decided(position, OTHER))
    each.reducer.wait()
    assert [(commit.position, commit.settles) for commit in each.commits] == [
        (1, False),
        (2, False),
    ]


def test_nothing_is_offered_after_the_last_round(bench):
    each = bench(position=2, spec=TWO_ROUNDS)
    each.start()
    each.reducer.submit(contribution())
    each.reducer.wait()
    each.let_loop_catch_up()
    assert each.offers == []


def test_what_the_codec_lost_stays_with_the_peer_once_it_counts(bench):
    spec = RunSpec.from_dict({"compression": {"codec": "bf16"}})
    each = bench(spec=spec)
    each.start()
    lossy = 1.0 + 2.0**-10  # bf16 has 8 bits
    window = each.submit(value=lossy)
    assert each.residual().abs().max() == 0
    each.deliver(decided(0, ME, settles=window.number, included=[True, False]))
    each.reducer.wait()
    mass_N = each.residual()
    assert mass_N[:CELL].unique().tolist() == [10.0 * 2.0**-10]
    assert mass_N[CELL:].abs().max() == 0


def test_an_owner_keeps_what_its_encoding_lost(bench):
    each = bench()
    each.start()
    credit = (slice(0, 3), torch.ones(3))
    each.deliver(decided(0, OTHER, credits=[credit]))
    each.reducer.wait()
    assert each.residual()[:4].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_peer_far_behind_drops_its_work_once(bench):
    each = bench()
    each.start()
    for position in range(FAR_BEHIND + 1):
        each.deliver(decided(position, OTHER))
    each.reducer.wait()
    (commit,) = each.commits
    assert (commit.reset, commit.position) == (True, FAR_BEHIND + 1)
    assert each.said == [f"dropped this peer's open work: {FAR_BEHIND + 1} positions behind"]
    assert each.submit().offer.weight == 0.0


def test_as_many_as_that_are_settled_one_by_one(bench):
    each = bench()
    each.start()
    for position in range(FAR_BEHIND):
        each.deliver(decided(position, OTHER))
    each.reducer.wait()
    assert [commit.reset for commit in each.commits] == [False] * FAR_BEHIND


def left_out_with(each, value, *members):
    """Hand in a contribution of a norm of so many times the others', and be left out."""
    offered = each.submit(value=value)
    each.deliver(decided(0, *members, settles=offered.number))
    each.reducer.wait()


def test_what_grew_beyond_three_times_the_median_norm_is_dropped_and_said(bench):
    each = bench()
    each.start()
    left_out_with(each, 3.5, OTHER)
    assert [commit.reset for commit in each.commits] == [False, True]
    assert each.said == [
        "dropped this peer's open work: it was left out of rounds and reached 3.5 times the "
        "median norm, "
        "more than 3 times"
    ]
    assert each.submit(1).offer.weight == 0.0


def test_what_was_left_out_and_did_not_grow_that_far_stays_in_the_drift(bench):
    each = bench()
    each.start()
    left_out_with(each, 2.9, OTHER)
    assert [commit.reset for commit in each.commits] == [False]
    assert each.submit(1).offer.weight > 0


def test_a_null_entry_says_nothing_of_norms(bench):
    each = bench()
    each.start()
    left_out_with(each, 100.0)
    assert [commit.reset for commit in each.commits] == [False]


def test_an_order_settles_nothing_and_brings_a_course(bench):
    each = bench()
    each.start()
    offered = each.submit()
    settings = RunSettings(number=1, inner_steps=7)
    control = entry(0).model_copy(
        update={"kind": "control", "order": b"x", "settings": settings.stored}
    )
    applied = Applied(entry=control, state=state(1), apply_s=0.0)
    each.deliver(Settled(applied=applied, included=None, settles=None))
    after = entry(1, ME).model_copy(update={"settings": settings.stored})
    applied = Applied(entry=after, state=state(2), apply_s=0.0)
    each.deliver(Settled(applied=applied, included=[True, True], settles=offered.number))
    each.reducer.wait()
    assert [commit.settles for commit in each.commits] == [False, True]
    assert [commit.counts for commit in each.commits] == [False, True]
    assert {commit.course for commit in each.commits} == {Course(inner_steps=7)}
    assert each.reducer.course == Course(inner_steps=7)


def in_codec(codec, number, position, *, settles=None):
    """A control entry with the order for a codec."""
    settings = RunSettings(number=number, codec=codec)
    control = entry(position).model_copy(
        update={"kind": "control", "order": b"x", "settings": settings.stored}
    )
    applied = Applied(entry=control, state=state(position + 1), apply_s=0.0)
    return Settled(applied=applied, included=None, settles=settles)


def test_another_codec_gives_up_what_was_encoded_and_keeps_the_residual(bench):
    each = bench()
    each.start()
    credits = [(slice(0, 1), torch.tensor([3.0]))]
    each.deliver(decided(0, OTHER, credits=credits))
    each.reducer.wait()
    number = each.submit().number
    each.replica.settings = RunSettings(number=1, codec="int4")
    each.deliver(in_codec("int4", 1, 1, settles=number))
    each.reducer.wait()
    assert [(c.settles, c.counts, c.reset) for c in each.commits][1:] == [(True, False, False)]
    assert float(each.residual()[0]) == 3.0
    window = each.submit(1)
    assert window.codec == "int4"
    assert len(window.offer.frames[0]) < 0.6 * CELL
    assert float(parse("int4").decode(window.offer.frames[0], CELL)[0]) > 1.0  # with the residual


def test_what_was_encoded_before_the_order_came_is_never_offered(bench, monkeypatch):
    """The loop has taken the order, and the trainer hands in before it hears of it."""
    each = bench()
    each.start()
    each.replica.settings = RunSettings(number=1, codec="int4")
    each.reducer.submit(contribution())
    each.reducer.await_residuals()
    each.let_loop_catch_up()
    assert each.offers == []
    each.deliver(in_codec("int4", 1, 0))
    each.reducer.wait()
    assert [(c.settles, c.counts) for c in each.commits] == [(True, False)]
    assert each.submit(1).codec == "int4"


def test_a_trainer_waits_in_a_pause_however_long_it_takes(bench):
    each = bench(patience_s=0.1)
    each.start()
    each.replica.settings = RunSettings(number=1, is_paused=True)
    offered = each.submit()
    resumed = decided(0, ME, settles=offered.number, included=[True, True])
    later = threading.Timer(0.3, each.deliver, [resumed])
    later.start()
    each.reducer.wait()  # without the pause, no longer than its patience
    assert [commit.counts for commit in each.commits] == [True]
    later.join()


def test_what_is_counted_is_not_dropped_however_long_it_is(bench):
    each = bench()
    each.start()
    offered = each.submit(value=100.0)
    each.deliver(decided(0, OTHER, ME, settles=offered.number, included=[False, True]))
    each.reducer.wait()
    assert [commit.reset for commit in each.commits] == [False]


def test_a_reset_frees_who_waits_and_forgets_the_residual(bench):
    each = bench()
    each.start()
    each.deliver(decided(0, OTHER, credits=[(slice(0, 3), torch.ones(3))]))
    each.reducer.wait()
    each.submit()
    each.deliver(Reset(state=state(9), why="recovered to position 9"))
    each.reducer.wait()
    assert (each.commits[-1].reset, each.commits[-1].position) == (True, 9)
    assert each.residual().abs().max() == 0


@pytest.mark.parametrize(
    ("members", "goes_on"), [((OTHER,), True), ((OTHER, ME), False)], ids=["left out", "member"]
)
def test_a_restart_goes_on_if_the_log_says_that_nothing_of_it_counted(bench, members, goes_on):
    before = bench(position=1)
    before.start()
    before.deliver(decided(1, OTHER, credits=[(slice(0, 3), torch.ones(3))]))
    before.reducer.wait()
    saved = before.reducer.state_dict()
    assert saved["position"] == 2

    after = bench(position=4)
    keep_entries(after.store, [entry(position, *members) for position in range(4)])
    after.start()
    after.reducer.load_state_dict(saved)
    assert after.commits[-1].reset is not goes_on
    assert bool(after.residual().abs().max() > 0) is goes_on
    assert (after.submit().offer.weight > 0) is goes_on


@pytest.mark.parametrize("now", [1, 2 + FAR_BEHIND + 1])
def test_a_restart_far_from_where_it_was_saved_begins_anew(bench, now):
    before = bench(position=2)
    before.start()
    saved = before.reducer.state_dict()
    after = bench(position=now)
    keep_entries(after.store, [entry(position, OTHER) for position in range(now)])
    after.start()
    after.reducer.load_state_dict(saved)
    assert after.commits[-1].reset
    assert f"saved at position 2, the run is at {now}" in after.said[0]


def test_a_log_that_does_not_reach_back_is_no_proof(bench):
    before = bench(position=2)
    before.start()
    after = bench(position=4)  # nothing is stored before position 4
    after.start()
    after.reducer.load_state_dict(before.reducer.state_dict())
    assert after.commits[-1].reset


def test_progress_of_a_loop_of_ones_own(bench):
    each = bench()
    assert each.reducer.progress.measured() is None  # nobody waits for a peer that has not begun
    each.start()
    assert each.reducer.progress.measured().ready_in_s == 0.0
    each.submit(tokens=100)
    each.deliver(decided(0, OTHER, settles=1))
    each.reducer.wait()
    told = each.reducer.progress.measured()
    assert told.tokens == 100
    assert told.inner_steps == SPEC.outer.inner_steps


def test_waiting_is_no_part_of_a_window(bench, monkeypatch):
    """Whether a round is hidden or waited for, the next window ends a window's training later."""
    clock = types.SimpleNamespace(
        now_s=100.0, monotonic=lambda: clock.now_s, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(reducer, "time", clock)
    monkeypatch.setattr(views, "time", clock)
    each = bench()
    each.start()
    clock.now_s += 6.0
    each.submit(tokens=100)
    assert each.reducer.progress.measured().ready_in_s == 6.0
    clock.now_s += 1.0
    with each.reducer.progress.waiting():
        clock.now_s += 20.0
        assert each.reducer.progress.measured().ready_in_s == 5.0
        # Others judge by it how long a round takes, and whether the run stands still.
        assert each.reducer.progress.measured().tokens_per_s == pytest.approx(100 / 7)
    assert each.reducer.progress.measured().ready_in_s == 5.0
    clock.now_s += 4.0
    told = each.reducer.progress.measured()
    assert told.ready_in_s == 1.0
    assert told.utilisation == pytest.approx(11 / 31)
    assert told.tokens_per_s == pytest.approx(100 / 31)


def test_a_loop_of_ones_own_is_told_how_long_its_windows_are(bench):
    outer = {"windows": "qsr", "inner_steps": 4, "growth": 0.004}
    spec = RunSpec.from_dict({"run": {"rounds": 40}, "outer": outer})
    for position in (0, 30):
        each = bench(position=position, spec=spec)
        each.start()
        inner_steps = each.reducer.timetable.window(position)
        assert inner_steps == spec.timetable(1).window(position) == (13 if position else 7)
        assert each.reducer.progress.measured().inner_steps == inner_steps


def test_it_must_be_started_first(bench):
    each = bench()
    with pytest.raises(RuntimeError, match="start"):
        each.reducer.submit(contribution())


def test_a_worker_cuts_the_model_as_the_run_does(bench):
    spec = RunSpec.from_dict({"outer": {"method": "sparseloco"}})
    layout = Layout(names=("w",), shapes=((128, 130),))
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(128, 130))})
    each = bench(spec=spec, layout=layout)
    each.replica.state = OuterState.genesis(layout, torch.zeros(layout.numel))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = DiLoCo(model, inner, each.reducer, inner_steps=1)
    assert each.reducer.method.name == "sparseloco"
    assert worker.fragments[0].tensors == cuts.tiled(layout).tensors


@pytest.mark.parametrize("missed", [(OTHER,), ()], ids=["update", "NULL"])
def test_windows_that_entries_went_on_without_are_offered_together(bench, missed):
    """Left out twice, with everything in the drift; then counted, and one window again."""
    each = bench()
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(NUMEL))})
    worker = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), each.reducer, inner_steps=2)
    for position, members in enumerate([missed, missed, (OTHER, ME), (OTHER, ME)]):
        included = [True, True] if ME in members else None
        settled = decided(position, *members, settles=position + 1, included=included)
        each.deliver(settled)
        for _ in range(2):
            model["w"].grad = torch.full((NUMEL,), 0.5)
            worker.step(tokens=10)
        assert each.reducer.progress.measured().tokens == worker.statistics().tokens
    each.let_loop_catch_up()
    assert [w.tokens for w in each.offers] == [20, 40, 60, 20]
    assert [w.offer.weight for w in each.offers] == [10.0] * 4
    assert [w.steps for w in each.offers] == [2, 4, 6, 2]
    assert each.offers[2].offer.norm == pytest.approx(3 * NORM)
    assert worker.statistics().resets == 0


def company(**changes):
    """The others, as far as a peer that waits for them reaches any."""
    waiting = []
    parts = {"is_alone": False, "reaches_nobody": False, "waiting": waiting}
    alone = types.SimpleNamespace(**(parts | changes))
    alone.with_others = lambda fragment, offer: waiting.append(offer) if alone.is_alone else offer()
    return alone


def test_a_trainer_alone_offers_nothing_and_does_not_go_on(bench):
    others = company(is_alone=True, reaches_nobody=True)
    each = bench(company=others, patience_s=0.01)
    each.start()
    each.reducer.submit(contribution())
    each.let_loop_catch_up()
    assert (each.offers, len(others.waiting)) == ([], 1)
    waiting = threading.Thread(target=each.reducer.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # although its patience is over
    others.is_alone = False
    each.thread.ask(others.waiting[0])
    assert each.offers
    each.reducer.stopping.set()
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("reaches_nobody", [True, False])
def test_a_joiner_that_reaches_nobody_counts_at_once(bench, reaches_nobody):
    each = bench(position=3, company=company(reaches_nobody=reaches_nobody))
    each.start()
    assert (each.submit().offer.weight > 0) is reaches_nobody
