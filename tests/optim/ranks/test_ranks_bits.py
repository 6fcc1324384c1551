"""A peer of several ranks has the bits of one process, with any method that has a common state."""

import pytest

from support.rank_work import every_method, some_methods, train_and_save
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


def test_two_ranks_have_the_bits_of_one_process_with_every_method(tmp_path):
    on_ranks(2, every_method, folder=tmp_path)


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_whose_ranges_are_uneven_do_too(world, tmp_path):
    on_ranks(world, some_methods, folder=tmp_path)


def test_other_numbers_of_ranks_resume_in_the_same_bits(tmp_path):
    specs = ("diloco(codec=int4, count=2)", "eager(codec=int8, peers=2)")
    on_ranks(2, train_and_save, specs, range(5), tmp_path, folder=tmp_path)
    on_ranks(3, train_and_save, specs, range(5, 8), tmp_path, folder=tmp_path)
