"""No rank is left waiting when another one fails."""

import pytest

from atoll.optim.ranks import Ranks, RanksError
from support.rank_work import rank_that_dies, without_a_word
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_without_a_process_group_there_are_no_ranks():
    with pytest.raises(RanksError, match="torchrun"):
        Ranks()


def test_ranks_end_out_of_step_or_when_the_leader_fails_or_is_silent(tmp_path):
    on_ranks(2, without_a_word, folder=tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_is_killed_all_end(victim, tmp_path):
    on_ranks(3, rank_that_dies, victim, tmp_path, folder=tmp_path, dying=(victim,))
    assert {file.name for file in tmp_path.iterdir()} >= {"0", "1", "2"} - {str(victim)}
