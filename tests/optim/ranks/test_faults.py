"""No rank is left waiting when another one fails."""

import pytest

from atoll.optim.ranks import Ranks, RanksError
from support.rank_work import rank_of_no_run, rank_out_of_step, rank_that_dies, silent_leader
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_without_a_process_group_there_are_no_ranks():
    with pytest.raises(RanksError, match="torchrun"):
        Ranks()


def test_what_the_leader_fails_with_reaches_all_ranks(tmp_path):
    on_ranks(2, rank_of_no_run, tmp_path, folder=tmp_path)


def test_ranks_that_are_out_of_step_end(tmp_path):
    on_ranks(2, rank_out_of_step, folder=tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_is_killed_all_end(victim, tmp_path):
    on_ranks(3, rank_that_dies, victim, tmp_path, folder=tmp_path, dying=(victim,))
    assert {file.name for file in tmp_path.iterdir()} >= {"0", "1", "2"} - {str(victim)}


def test_a_rank_waits_as_long_as_the_leader_shows_signs_of_life(tmp_path):
    on_ranks(2, silent_leader, folder=tmp_path)
