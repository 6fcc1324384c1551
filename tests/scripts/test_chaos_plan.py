"""The faults of a run under chaos."""

from itertools import pairwise

import pytest
from chaos_plan import GAPS, KINDS, MOST_SHARE, RECOVERS_S, draw

SEEDS = range(50)


@pytest.mark.parametrize("peers", [3, 8])
def test_faults_leave_a_majority_and_are_over_before_the_end(peers: int) -> None:
    for seed in SEEDS:
        faults = draw(seed, seconds=1800.0, peers=peers, every_s=30.0)
        for fault in faults:
            assert fault.ends_s <= 1800.0 - RECOVERS_S
            others = [f for f in faults if f is not fault and f.at_s <= fault.at_s]
            lasting = [f for f in others if f.ends_s + RECOVERS_S > fault.at_s]
            assert fault.host not in {f.host for f in lasting}
            if fault.host:
                disturbed = {f.host for f in lasting} - {0}
                assert len(disturbed) + 1 <= MOST_SHARE * peers
            assert (fault.host == 0) == (fault.kind == "coordinator")


def test_faults_come_as_often_as_was_asked_for() -> None:
    num = [len(draw(seed, seconds=1800.0, peers=8, every_s=30.0)) for seed in SEEDS]
    assert 50 < sum(num) / len(num) < 62
    faults = draw(0, seconds=1800.0, peers=8, every_s=30.0)
    gaps_s = [later.at_s - one.at_s for one, later in pairwise(faults)]
    assert min(gaps_s) >= GAPS[0] * 30.0


def test_each_kind_comes_even_in_a_short_run() -> None:
    for seed in SEEDS:
        faults = draw(seed, seconds=600.0, peers=8, every_s=30.0)
        assert {fault.kind for fault in faults} == set(KINDS)


def test_a_seed_repeats_exactly() -> None:
    first, again, other = (draw(seed, seconds=600.0, peers=8, every_s=30.0) for seed in (1, 1, 2))
    assert first == again != other
