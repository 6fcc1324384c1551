"""The networked reducer where a model moves in fragments: whose turn it is, and what each keeps."""

import threading
import time

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.live_replica import Applied
from atoll.optim.log.orders import RunSettings
from atoll.optim.state.layout import CELL, Layout
from atoll.peer.daemon.log_run import HIDDEN_STALLS, hidden_patience_s
from support.reducer_bench import ME, OTHER, contribution, decided, of_fragment, state

HALVES = Layout(names=("blocks.0.w", "blocks.1.w"), shapes=((CELL,), (100,)))
STREAMING = RunSpec.from_dict(
    {"outer": {"method": "streaming(count=2, tau=0)"}, "compression": {"codec": "fp32"}}
)


HIDDEN = RunSpec.from_dict({"outer": {"method": "diloco(tau=5)"}, "compression": {"codec": "fp32"}})


def decided_fragment(position, fragment, settles):
    """An entry of one fragment without this peer."""
    base = decided(position, OTHER, settles=settles)
    entry_ = base.applied.entry.model_copy(update={"fragment": fragment})
    base.applied = Applied(entry=entry_, state=state(position + 1), apply_s=0.0)
    return base


def test_only_the_fragment_whose_turn_it_is_is_waited_for(bench):
    each = bench(spec=STREAMING, layout=HALVES)
    each.start()
    each.reducer.submit(of_fragment(0))  # the turn of position 1
    each.reducer.wait()
    assert each.commits == []
    each.reducer.submit(of_fragment(1))
    each.deliver(decided_fragment(0, 1, settles=2))
    each.deliver(decided_fragment(1, 0, settles=1))
    each.reducer.wait()
    assert [(c.fragment, c.settles, c.position) for c in each.commits] == [
        (1, True, 1),
        (0, True, 2),
    ]


def test_a_token_that_each_fragment_trains_on_is_told_once(bench):
    each = bench(spec=STREAMING, layout=HALVES)
    each.start()
    for number, fragment in enumerate([1, 0, 1, 0]):
        each.reducer.submit(of_fragment(fragment))
        each.deliver(decided_fragment(number, fragment, settles=number + 1))
        each.reducer.wait()
    # All were left out, so the later ones hold the work of the earlier ones.
    assert each.reducer.progress.measured().tokens == of_fragment(0).tokens


def test_a_wait_does_not_go_on_for_a_younger_one(bench):
    each = bench(spec=STREAMING, layout=HALVES)
    each.start()
    each.reducer.submit(of_fragment(1))
    each.reducer.submit(of_fragment(0))
    threading.Timer(0.1, each.deliver, [decided_fragment(0, 1, settles=1)]).start()
    each.reducer.wait()  # the other one has 30 s left
    assert [c.fragment for c in each.commits] == [1]


def test_a_fragment_that_has_no_turn_left_is_not_offered(bench):
    spec = RunSpec.from_dict(
        {
            "outer": {"method": "streaming(count=2, tau=0)"},
            "compression": {"codec": "fp32"},
            "run": {"rounds": 3},
        }
    )
    each = bench(position=1, spec=spec, layout=HALVES)
    each.start()
    each.submit_fragment(0)  # position 1
    each.submit_fragment(1)  # position 2, the last
    each.replica.state = state(2)
    each.submit_fragment(0)  # position 3
    assert [window.fragment for window in each.offers] == [0, 1]


def test_each_fragment_has_its_own_residual_and_a_restart_restores_it(bench):
    each = bench(spec=STREAMING, layout=HALVES)
    each.start()
    saved = each.reducer.state_dict()
    assert [r["mass_N"].numel() for r in saved["feedback"]] == [CELL, 100]
    saved["feedback"][1]["mass_N"].fill_(3.0)
    again = bench(spec=STREAMING, layout=HALVES)
    again.start()
    again.reducer.load_state_dict(saved)
    assert again.reducer.state_dict()["feedback"][1]["mass_N"].unique().tolist() == [3.0]
    assert [(c.fragment, c.included) for c in again.commits] == [(0, None), (1, None)]


def test_a_joiner_counts_for_nothing_once_in_every_fragment(bench):
    each = bench(position=4, spec=STREAMING, layout=HALVES)
    each.start()
    weights = []
    for fragment in (1, 0, 1, 0):
        each.offered.clear()
        each.reducer.submit(of_fragment(fragment))
        assert each.offered.wait(10)
        weights.append((each.offers[-1].fragment, each.offers[-1].offer.weight))
    assert weights == [(1, 0.0), (0, 0.0), (1, 10.0), (0, 10.0)]


def test_who_hides_its_rounds_waits_until_it_is_in_step(bench):
    """New, and after a window that was left out; else it trains on."""
    each = bench(spec=HIDDEN)
    each.start()

    def submit(window, *members):
        included = [True, True] if ME in members else None
        answer = decided(window, *members, settles=window + 1, included=included)
        threading.Timer(0.1, each.deliver, [answer]).start()
        before = len(each.commits)
        each.reducer.submit(contribution(window))
        waited = len(each.commits) > before
        each.reducer.wait()
        return waited

    assert submit(0, ME, OTHER)
    assert not submit(1, ME, OTHER)
    assert not submit(2, OTHER)
    assert submit(3, ME, OTHER)
    assert not submit(4, ME, OTHER)
    assert [commit.position for commit in each.commits] == [1, 2, 3, 4, 5]


def in_step(each):
    """Let a first window count."""
    each.start()
    answer = decided(0, ME, OTHER, settles=1, included=[True, True])
    threading.Timer(0.05, each.deliver, [answer]).start()
    each.reducer.submit(contribution(0))
    each.reducer.wait()
    return each


def test_who_hides_its_rounds_and_is_cut_off_trains_on(bench):
    each = in_step(bench(spec=HIDDEN, hidden_s=0.05))
    each.reducer.submit(contribution(1))
    each.reducer.wait()  # 30 s for others
    until_s = each.reducer._offers[0].until_s
    each.reducer.wait()  # as after each of the steps that follow
    assert each.reducer._offers[0].until_s == until_s < time.monotonic()
    each.deliver(decided(1, OTHER, settles=2))
    each.reducer.wait()
    assert [commit.counts for commit in each.commits] == [True, False]
    late = threading.Thread(target=each.reducer.submit, args=[contribution(2)])
    late.start()
    late.join(0.3)
    assert late.is_alive()  # left out: it waits until it is in step
    each.deliver(decided(2, ME, settles=3, included=[True, True]))
    late.join(10)
    assert [commit.counts for commit in each.commits] == [True, False, True]


def test_windows_by_deadline_never_wait_for_a_hidden_round(bench):
    spec = RunSpec.from_dict(
        {
            "outer": {"method": "diloco(tau=5)", "windows": "deadline"},
            "compression": {"codec": "fp32"},
        }
    )
    assert hidden_patience_s(spec) == 0.0
    assert hidden_patience_s(HIDDEN) == HIDDEN_STALLS * HIDDEN.round.stall_s
    each = bench(spec=spec, hidden_s=hidden_patience_s(spec))
    each.start()
    for position, members in enumerate([[ME], [OTHER], [ME]]):  # new, in step, and left out
        before_s = time.monotonic()
        each.reducer.submit(contribution(position))
        each.reducer.wait()
        until_s = each.reducer._offers[0].until_s
        assert until_s < before_s + 1.0  # not the stalls of windows by steps
        assert len(each.commits) == position
        included = [True, True] if ME in members else None
        each.deliver(decided(position, *members, settles=position + 1, included=included))
        each.reducer.wait()
    assert [commit.counts for commit in each.commits] == [True, False, True]


def test_who_hides_its_rounds_waits_in_a_pause(bench):
    each = in_step(bench(spec=HIDDEN, hidden_s=0.05))
    each.replica.settings = RunSettings(number=1, is_paused=True)
    each.reducer.submit(contribution(1))
    waiting = threading.Thread(target=each.reducer.wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    each.deliver(decided(1, ME, settles=2, included=[True, True]))
    waiting.join(10)
    assert [commit.counts for commit in each.commits] == [True, True]
