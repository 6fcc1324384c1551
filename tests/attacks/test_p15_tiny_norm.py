"""P15: half of a group declares next to nothing, so that the medians clip all others to nothing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.optim.inprocess.rounds import MeanReduction
from atoll.optim.log.electorate import Succession, succeed
from atoll.optim.log.entry import Entry, MalformedRecord
from atoll.optim.methods import parse
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.contribution import (
    NORM_FLOOR,
    NORM_MOVES,
    admitted_clips,
    cap_weights,
    carried_norm,
    drift_ratio,
)
from atoll.optim.state.layout import Layout
from support import greedy
from support.swarm import SMALL, reached, run_swarm


def clips(norms, weights=None, steps=None, carried=1.0):
    weights = cap_weights(weights or [1.0] * len(norms))
    return admitted_clips(weights, norms, steps or [30] * len(norms), at=2.0, carried=carried)


@pytest.mark.parametrize("liars", [1, 2, 3])
@pytest.mark.parametrize(
    ("weight", "steps"), [(1.0, 30), (1e-7, 1 << 24), (1e9, 1)], ids=["norm", "long", "short"]
)
def test_honest_contributions_keep_half_of_the_carried_norm(liars, weight, steps):
    honest = [1.0] * liars
    norms, weights = [*honest, *[1e-30] * liars], [*honest, *[weight] * liars]
    before, *_ = clips(norms, weights, [*[30] * liars, *[steps] * liars], carried=0.0)
    assert before < 1e-20, "the first entry has no floor"
    got = clips(norms, weights, [*[30] * liars, *[steps] * liars])
    assert got == [NORM_FLOOR] * liars + [1.0] * liars


def test_what_the_bound_lets_through_is_not_clipped_by_the_floor():
    assert clips([1.0, 1.5, 0.7]) == [1.0, 1.0, 1.0]
    assert clips([1.0, 8.0, 1.0]) == [1.0, 0.25, 1.0]
    assert clips([0.1, 8.0, 0.1]) == [1.0, NORM_FLOOR / 8, 1.0], "norms fell since"


def test_keys_of_weight_0_do_not_move_the_medians():
    weights = [1.0, 1.0, 0.0, 0.0, 0.0]
    assert clips([1.0, 1.0, *[1e-30] * 3], weights, carried=0.0) == [1.0] * 5


amounts = st.floats(1e-40, 1e40)


@settings(deadline=None)
@given(st.lists(amounts, min_size=1, max_size=4), st.data(), st.floats(1.0, 2.0))
def test_half_of_a_group_moves_the_norm_no_further_than_the_others_do(lies, data, before):
    honest = data.draw(st.lists(st.floats(0.5, 4.0), min_size=len(lies), max_size=9))
    after = carried_norm(before, [*honest, *lies])
    assert min(before, *honest) <= after <= max(before, *honest)


@settings(deadline=None)
@given(st.lists(amounts, min_size=1, max_size=9), amounts)
def test_one_entry_moves_the_norm_by_a_factor_at_most(norms, before):
    after = carried_norm(before, norms)
    assert before / NORM_MOVES <= after <= before * NORM_MOVES


def test_honest_members_pull_the_norm_back():
    norm = 1.0
    for _ in range(4):  # terms of a leader that leaves all others out
        norm = carried_norm(norm, [1e-30])
    assert norm == NORM_MOVES**-4
    for _ in range(4):
        norm = carried_norm(norm, [1.0, 1.1, 0.9])
    assert norm == 1.0
    for honest in (0.5, 0.25, 0.125):  # as honest norms fall, so does it
        norm = carried_norm(norm, [honest, 1.2 * honest, 1e30])
    assert norm == 1.2 * 0.125
    assert carried_norm(norm, []) == carried_norm(norm, [0.0]) == norm


def test_work_that_was_left_out_is_not_dropped_for_a_tiny_norm():
    assert drift_ratio(1.0, [1e-30]) > 1e20
    assert drift_ratio(1.0, [1e-30], carried_norm(1.0, [1e-30])) == NORM_MOVES


def test_an_entry_whose_norms_do_not_follow_is_refused(tmp_path):
    """A leader could otherwise write any floor into the log."""

    async def scenario(swarm):
        peers = await swarm.start(3)
        await swarm.until(lambda: reached(peers, 2))
        voter = peers[0].rounds.voter
        replica = peers[0].replica
        last = Entry.decode(replica.store.get(replica.position - 1).entry)
        then = succeed(
            replica.voters,
            position=replica.position,
            fragment=0,
            members=last.members,
            parts=last.parts,
        )
        lr, momentum = peers[0].ctx.scalars(replica.position)
        changes = {
            "position": replica.position,
            "previous_chain": replica.chain,
            "lr": lr,
            "momentum": momentum,
            "electorate": then.electorate,
            "newcomers": then.newcomers,
            "norms": then.norms,
        }
        entry = last.model_copy(update=changes)
        assert voter._check_derived(entry) == []
        assert len(then.norms) == 1 and then.norms[0] > 0
        for norms in ((), (0.0,), (math.nextafter(then.norms[0], 0.0),), (*then.norms, 0.0)):
            with pytest.raises(MalformedRecord, match="norms"):
                voter._check_derived(entry.model_copy(update={"norms": norms}))

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)


def test_each_fragment_has_a_norm_of_its_own():
    now = Succession(())
    assert [now.norm(fragment) for fragment in range(3)] == [0.0] * 3
    now = replace(now, norms=(1.0, 0.0, 3.0))
    assert [now.norm(fragment) for fragment in range(4)] == [1.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_run_learns_from_the_other_half(tmp_path, monkeypatch, count):
    async def scenario(swarm):
        peers = await swarm.start(count)
        await swarm.until(lambda: reached(peers, 3))
        honest = peers[: count // 2]
        for liar in peers[count // 2 :]:
            greedy.shrink(monkeypatch, liar)
        at = max(p.replica.position for p in peers) + 1
        await swarm.until(lambda: reached(peers, at + 8))
        names = {p.identity.peer_id for p in honest}
        store = peers[0].replica.store
        entries = [Entry.decode(row.entry) for row in store.headers(at, 8)]
        lied = 0
        for entry in entries:
            lied += any(m.norm < 1e-20 for m in entry.members)
            for member in entry.members:
                if member.peer_id in names:
                    assert member.clip * member.norm > 0.4 * entries[0].norms[0]
        assert lied >= 6, "the liars took no part"
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario, codec="int8", layout=SMALL)


def test_workers_of_one_process_have_the_same_floor():
    method = parse("diloco", codec="fp32")
    layout = Layout(names=("w",), shapes=((64,),))
    fragment = method.fragments(layout)[0]
    reduction = MeanReduction(method, layout, fragment, 2)
    state = method.genesis(layout, torch.zeros(64))
    ones = torch.ones(64)
    for theirs, wanted in ((ones, 1.0), (1e-30 * ones, NORM_FLOOR / 2)):
        both = [
            Contribution(window=0, delta=delta, tokens=8, steps=2, loss=1.0)
            for delta in (ones, theirs)
        ]
        update_F = reduction.reduce(both, reduction.weights(both), state).update_F
        torch.testing.assert_close(update_F, wanted * ones)
