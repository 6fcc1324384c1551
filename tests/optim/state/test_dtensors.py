import pytest

from support.rank_work import layout_of_cut_parameters, two_ranks
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_a_layout_reads_and_writes_parameters_that_are_cut_over_ranks(tmp_path):
    on_ranks(4, layout_of_cut_parameters, folder=tmp_path)


def test_a_gathered_root_is_cut_again_and_partial_sums_are_refused(tmp_path):
    on_ranks(2, two_ranks, folder=tmp_path)
