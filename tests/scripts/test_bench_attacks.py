"""The rows of `scripts/bench_attacks.py`: which targets an attack misses, and what is measured."""

import attacks_real as real
import attacks_rows as rows
import pytest
from attacks_rows import Phase, Progress, missed, table

from atoll.coordinator.run.status import RoundSummary


def row(*, stranger=False, before=12.0, during=12.0, longest_s=5.0, memory_mb=0.0):
    phases = [Phase(rate=rate, longest_s=longest_s) for rate in (before, during, before)]
    return rows.row_of(
        "p3", "lies", phases, stranger=stranger, deadline_s=33.0, memory_mb=memory_mb, saw="much"
    )


@pytest.mark.parametrize(
    ("measured", "target"),
    [
        ({"longest_s": 66.0}, ""),
        ({"longest_s": 66.5}, "two deadlines"),
        ({"during": 1.0}, ""),  # a member may slow a run down
        ({"stranger": True, "during": 11.0}, ""),
        ({"stranger": True, "during": 10.0}, "rounds take 20% longer"),
        ({"stranger": True, "during": 0.0}, "rounds take inf% longer"),
        ({"memory_mb": 100.0}, ""),
        ({"memory_mb": 101.0}, "101 MB"),
    ],
)
def test_a_target_is_missed_beyond_its_bound_alone(measured, target):
    wrong = missed(row(**measured))
    assert [target in text for text in wrong] == [True] * bool(target)
    assert (target or "| met |") in table([row(**measured)])


def test_the_longest_time_without_a_round_may_be_the_last():
    progress = Progress(began_s=100.0, first=7)
    for now_s, position in ((101.0, 8), (104.0, 8), (105.0, 10), (160.0, 10)):
        progress.note(now_s, position)
    assert progress.phase() == Phase(rate=3.0, longest_s=55.0)


def test_a_peer_is_out_from_the_first_round_after_which_it_is_in_none():
    def rounds(*left_out):
        return [
            RoundSummary(position=at, at=100.0 + at, left_out=["liar"] * out)
            for at, out in enumerate(left_out, start=1)
        ]

    history = rounds(True, False, True, True)
    assert real.left_out_since_s(history, "liar", 101.5) == 1.5
    assert real.left_out_since_s(history, "other", 101.5) is None
    assert real.left_out_since_s(history[:2], "liar", 100.0) is None
